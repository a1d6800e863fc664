"""Small kernels for the tests: builders, as those of the backend are."""

from typing import Any

import tilelang.cpu.language as on_cpu
import tilelang.language as T  # noqa: N812 - TileLang's parser knows it by this name

from chunkwise_tilelang.tiles.sequences import (
    band_slots,
    chunk_ends,
    chunk_rows,
    cut_behind,
    entry_of,
    segment_rows,
    segments_of,
    sequence_rows,
    walked,
)


def add(*, width: int) -> Any:
    """y = x + a over the rows of [M, width] fp32."""
    M = T.dynamic("M")

    @T.prim_func
    def add_kernel(x: T.Tensor((M, width), "float32"), y: T.Tensor((M, width), "float32"), a: T.float32):
        with T.Kernel(M, threads=32) as row:
            for j in T.Parallel(width):
                y[row, j] = x[row, j] + a

    return add_kernel


def product(*, rows: int, dtype: str = "bfloat16") -> Any:
    """C [M, 256] fp32 = A [M, 256] B [256, 256]."""
    M = T.dynamic("M")

    @T.prim_func
    def product_kernel(A: T.Tensor((M, 256), dtype), B: T.Tensor((256, 256), dtype), C: T.Tensor((M, 256), "float32")):
        with T.Kernel(T.ceildiv(M, rows), 2, threads=128) as (x, y):
            a = T.alloc_shared((rows, 64), dtype)
            b = T.alloc_shared((64, 128), dtype)
            c = T.alloc_fragment((rows, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[x * rows, k * 64], a)
                T.copy(B[k * 64, y * 128], b)
                T.gemm(a, b, c)
            T.copy(c, C[x * rows, y * 128])

    return product_kernel


def unknown() -> Any:
    """Calls a device function that no header has: TileLang lowers it, the compiler refuses it."""

    @T.prim_func
    def unknown_kernel(x: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            for j in T.Parallel(32):
                x[j] = T.call_extern("float32", "no_such_function", x[j])

    return unknown_kernel


def spilling(*, width: int) -> Any:
    """Keeps more rows in registers than a thread has."""

    @T.prim_func
    def spilling_kernel(x: T.Tensor((width, 128), "float32"), y: T.Tensor((width, 128), "float32")):
        with T.Kernel(1, threads=128):
            rows = T.alloc_fragment((width, 128), "float32")
            total = T.alloc_fragment((128,), "float32")
            T.copy(x, rows)
            T.reduce_sum(rows, total, dim=0)
            for i, j in T.Parallel(width, 128):
                y[i, j] = rows[i, j] * total[j]

    return spilling_kernel


def producer(*, siblings: bool) -> Any:
    """A ring between 128 threads that load and 128 that add; as siblings TileLang puts a barrier between them."""

    @T.prim_func
    def producer_kernel(x: T.Tensor((64, 128), "float32"), y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            ring = T.alloc_shared((2, 128), "float32")
            total = T.alloc_fragment((128,), "float32")
            full = T.alloc_barrier([128] * 2)
            empty = T.alloc_barrier([128] * 2)
            thread = T.get_thread_binding()
            if siblings:
                with T.ws(1):
                    for k in T.serial(64):
                        T.mbarrier_wait_parity(empty[k % 2], (k // 2 + 1) % 2)
                        ring[k % 2, thread - 128] = x[k, thread - 128]
                        T.mbarrier_arrive(full[k % 2])
                with T.ws(0):
                    T.clear(total)
                    for k in T.serial(64):
                        T.mbarrier_wait_parity(full[k % 2], (k // 2) % 2)
                        for j in T.Parallel(128):
                            total[j] += ring[k % 2, j]
                        T.mbarrier_arrive(empty[k % 2])
                    T.copy(total, y)
            elif thread >= 128:
                for k in T.serial(64):
                    T.mbarrier_wait_parity(empty[k % 2], (k // 2 + 1) % 2)
                    ring[k % 2, thread - 128] = x[k, thread - 128]
                    T.mbarrier_arrive(full[k % 2])
            else:
                T.clear(total)
                for k in T.serial(64):
                    T.mbarrier_wait_parity(full[k % 2], (k // 2) % 2)
                    for j in T.Parallel(128):
                        total[j] += ring[k % 2, j]
                    T.mbarrier_arrive(empty[k % 2])
                T.copy(total, y)

    return producer_kernel


def chained(*, early: bool) -> Any:
    """Two asynchronous products into one accumulator; ``early`` reads it before they have ended."""

    @T.prim_func
    def chained_kernel(
        A: T.Tensor((64, 64), "bfloat16"), B: T.Tensor((64, 64), "bfloat16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((64, 64), "bfloat16")
            b = T.alloc_shared((64, 64), "bfloat16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.wgmma_gemm(a, b, c)
            if early:
                for i, j in T.Parallel(64, 64):
                    c[i, j] = c[i, j] * 2.0
            T.wgmma_gemm(a, b, c)
            T.wait_wgmma(0)
            T.copy(c, C)

    return chained_kernel


def racing(*, apart: bool) -> Any:
    """Every thread writes into one place, or with ``apart`` into a place of its own."""

    @T.prim_func
    def racing_kernel(x: T.Tensor((128,), "float32"), y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            shared = T.alloc_shared((128,), "float32")
            for j in T.Parallel(128):
                shared[j if apart else 0] = x[j]
            for j in T.Parallel(128):
                y[j] = shared[127 - j]

    return racing_kernel


def places(ragged: bool, chunk_size: int) -> Any:
    """For the CPU: where each chunk and each segment lies, and which segments each sequence has."""
    offsets, slots, segments, sequences = (T.dynamic(name) for name in ("offsets", "slots", "segments", "sequences"))

    @T.prim_func
    def places_of(
        cu_seqlens: T.Tensor((offsets,), "int32"),
        by_chunk: T.Tensor((slots, 6), "int32"),
        by_segment: T.Tensor((segments, 5), "int32"),
        by_sequence: T.Tensor((sequences, 2), "int32"),
        steps: T.int32,
        rows: T.int32,
        chunks: T.int32,
    ):
        with on_cpu.Kernel(1):
            for slot in T.serial(slots):
                batch, first, count = chunk_rows(slot, cu_seqlens, offsets - 1, steps, rows, chunk_size, ragged)
                by_chunk[slot, 0] = batch
                by_chunk[slot, 1] = first
                by_chunk[slot, 2] = count
                owner, opens, closes = chunk_ends(slot, cu_seqlens, offsets - 1, steps, rows, chunk_size, ragged)
                by_chunk[slot, 3] = owner
                by_chunk[slot, 4] = opens
                by_chunk[slot, 5] = closes
            for slot in T.serial(segments):
                n, start, length, chunk, ends = segment_rows(
                    slot, cu_seqlens, offsets - 1, steps, rows, chunk_size, chunks, ragged
                )
                by_segment[slot, 0] = n
                by_segment[slot, 1] = start
                by_segment[slot, 2] = length
                by_segment[slot, 3] = chunk
                by_segment[slot, 4] = ends
            for n in T.serial(sequences):
                slot, count = segments_of(n, cu_seqlens, rows, chunk_size, chunks, ragged)
                by_sequence[n, 0] = slot
                by_sequence[n, 1] = count

    return places_of


def overlaid(*, barrier: bool) -> Any:
    """Two tiles that are not needed together, in one place; without TileLang's barriers, and with its own or not."""

    @T.prim_func
    def overlaid_kernel(x: T.Tensor((256,), "float32"), y: T.Tensor((256,), "float32")):
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})
        with T.Kernel(1, threads=128) as _:
            early = T.alloc_shared((256,), "float32")
            late = T.alloc_shared((256,), "float32")
            held = T.alloc_local((2,), "float32")
            tx = T.get_thread_binding()
            for i in T.unroll(2):
                early[i * 128 + tx] = x[i * 128 + tx]
            T.sync_threads()
            for i in T.unroll(2):
                held[i] = early[255 - i * 128 - tx]
            if barrier:
                T.sync_threads()
            for i in T.unroll(2):
                late[i * 128 + tx] = held[i]
            T.sync_threads()
            for i in T.unroll(2):
                y[i * 128 + tx] = late[(i * 128 + tx + 64) % 256]

    return overlaid_kernel


def bands(chunk_size: int) -> Any:
    """For the CPU: what each place of a dense call has of a band, and where each chunk of the band lies."""
    places, units, offsets = (T.dynamic(name) for name in ("places", "units", "offsets"))

    @T.prim_func
    def bands_of(
        cu_seqlens: T.Tensor((offsets,), "int32"),
        by_place: T.Tensor((places, 5), "int32"),
        by_unit: T.Tensor((units, 2), "int32"),
        rows: T.int32,
        chunks: T.int32,
        width: T.int32,
        first: T.int32,
        count: T.int32,
        at: T.int32,
        size: T.int32,
        cuts: T.int32,
    ):
        with on_cpu.Kernel(1):
            for place in T.serial(places):
                n, begin, length, _, _ = segment_rows(place, cu_seqlens, 0, 0, rows, chunk_size, chunks, False)
                start, taken, slot = walked(place, begin, length, chunk_size, width, (first, count, at))
                entry = entry_of(place, n, start, chunk_size, cuts)
                by_place[place, 0] = n
                by_place[place, 1] = start
                by_place[place, 2] = taken
                by_place[place, 3] = slot
                by_place[place, 4] = entry
            for unit in T.serial(units):
                slot, kept = band_slots(unit, rows, chunk_size, chunks, width, (first, count, at, size))
                by_unit[unit, 0] = slot
                by_unit[unit, 1] = kept

    return bands_of


def cuts(ragged: bool, chunk_size: int) -> Any:
    """For the CPU: the first chunk of each segment that has a cut before it, and the slot of that cut."""
    segments, offsets = (T.dynamic(name) for name in ("segments", "offsets"))

    @T.prim_func
    def cuts_of(
        cu_seqlens: T.Tensor((offsets,), "int32"),
        by_segment: T.Tensor((segments, 4), "int32"),
        steps: T.int32,
        rows: T.int32,
        chunks: T.int32,
        count: T.int32,
    ):
        with on_cpu.Kernel(1):
            for slot in T.serial(segments):
                n, start, length, _, _ = segment_rows(
                    slot, cu_seqlens, offsets - 1, steps, rows, chunk_size, chunks, ragged
                )
                batch, opening, _, _ = sequence_rows(n, cu_seqlens, rows, chunk_size, ragged)
                turn, cut = cut_behind((start - opening) // chunk_size, batch, start, chunk_size, count)
                by_segment[slot, 0] = start
                by_segment[slot, 1] = length
                by_segment[slot, 2] = turn
                by_segment[slot, 3] = cut

    return cuts_of
