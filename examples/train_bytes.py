"""Trains a small byte-level language model, of gated-delta-net layers by default, on text that ships with Python.

    python examples/train_bytes.py            # two to three minutes on two CPU cores; takes a GPU if there is one
    python examples/train_bytes.py --resume   # goes on from runs/demo/checkpoint.pt

Reads top to bottom; the parts are corpus.py (text to packed documents), count_model.py (the baseline),
model.py (the layers around the op), optim.py, training.py, generate.py and report.py.
"""

import argparse
import json
import os
import platform
from contextlib import nullcontext
from pathlib import Path

# Read when torch loads. Threads that spin while they wait cost a factor of ten once other work shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from corpus import Corpus, load_corpus, pack
from count_model import CountModel
from generate import generate
from model import MIXERS, ByteModel, ModelConfig
from report import Metrics, as_dict, plot_curve, summary
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from training import OtherRunError, Trainer, TrainingOptions, bits_per_byte

import chunkwise

PROMPT = b"The "


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixer", choices=sorted(MIXERS), default="gated_delta_rule", help="the layer to train")
    parser.add_argument("--steps", type=positive_int, default=200, help="updates, at most (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=140.0,
        help="training time, at most (%(default)s); 0: no limit. A slower machine takes fewer steps, and the "
        "learning rate falls to zero all the same",
    )
    parser.add_argument("--batch", type=positive_int, default=4096, help="bytes in a batch, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order, dropout and sample (%(default)s)")
    parser.add_argument("--device", help="cpu or cuda; by default a GPU where there is one")
    parser.add_argument("--backend", help="a backend or implementation of chunkwise; by default the best one")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of results (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in that folder")
    parser.add_argument("--checkpoint-every", type=positive_int, default=50, help="steps (%(default)s)")
    parser.add_argument("--sample-bytes", type=int, default=600, help="bytes to generate (%(default)s)")
    return parser.parse_args(arguments)


def positive_int(text: str) -> int:
    """An int of at least 1, or argparse's error."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {value}")
    return value


def chosen_route(model: ByteModel, corpus: Corpus, device: torch.device) -> str:
    """The forward and backward implementations that a training call of the first layer takes."""
    batch = pack(corpus.train[:4]).to(device)
    return model.explain(batch.tokens, batch.cu_seqlens).route or "none"


def train(trainer: Trainer, corpus: Corpus, checkpoint: Path, console: Console) -> None:
    """Trains under a progress bar."""
    figures = TextColumn("step {task.fields[step]}  {task.fields[bits]:.2f} bits/byte")
    columns = (TextColumn("training"), BarColumn(), figures, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1.0, step=trainer.step, bits=8.0)

        def show(trainer: Trainer) -> None:
            bar.update(task, completed=trainer.progress, step=trainer.step, bits=trainer.curve[-1])

        trainer.train(corpus.train, checkpoint, show)


def new_trainer(options: argparse.Namespace, device: torch.device) -> Trainer:
    """A model with fresh weights and its optimisers."""
    torch.manual_seed(options.seed)
    model = ByteModel(ModelConfig(mixer=options.mixer)).to(device)
    limits = TrainingOptions(
        steps=options.steps,
        seconds=options.seconds or float("inf"),
        bytes_per_batch=options.batch,
        seed=options.seed,
        checkpoint_every=options.checkpoint_every,
    )
    return Trainer(model, limits, device)


def run(options: argparse.Namespace, console: Console) -> Metrics:
    """Everything between the command line and the closing table."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    corpus = load_corpus()
    train_bytes, held_out_bytes = sum(map(len, corpus.train)), sum(map(len, corpus.held_out))
    console.print(f"{train_bytes:,} bytes to train on, {held_out_bytes:,} held out, no paragraph in both")
    count_model = CountModel(corpus.train).bits_per_byte(corpus.held_out)
    trainer = new_trainer(options, device)
    before = bits_per_byte(trainer.model, corpus.held_out, options.batch, device)
    console.print(f"held-out bits per byte: order-2 count model {count_model:.3f}, before training {before:.3f}")
    checkpoint = options.out / "checkpoint.pt"
    if options.resume:
        trainer.load(checkpoint)
        console.print(f"resumed from {checkpoint} at step {trainer.step}")
    route = chosen_route(trainer.model, corpus, device)
    console.print(f"route: {route}", highlight=False, soft_wrap=True)
    train(trainer, corpus, checkpoint, console)

    after = bits_per_byte(trainer.model, corpus.held_out, options.batch, device)
    sample = generate(trainer.model, PROMPT, options.sample_bytes, temperature=0.7, seed=options.seed)
    (options.out / "sample.txt").write_bytes(sample)
    console.print(sample.decode(errors="replace"), markup=False, highlight=False, style="dim")
    return Metrics(
        mixer=options.mixer,
        route=route,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        seed=options.seed,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        train_bytes=train_bytes,
        held_out_bytes=held_out_bytes,
        count_model_bits_per_byte=count_model,
        before_bits_per_byte=before,
        after_bits_per_byte=after,
        steps=trainer.step,
        training_seconds=trainer.seconds,
        bytes_seen=trainer.bytes_seen,
        bytes_per_second=trainer.bytes_seen / trainer.seconds,
        curve=trainer.curve,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = parse_arguments(arguments)
    console = Console()
    checkpoint = options.out / "checkpoint.pt"
    if options.resume and not checkpoint.exists():
        console.print(f"--resume: there is no {checkpoint}", style="red")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with chunkwise.prefer(options.backend) if options.backend else nullcontext():
            metrics = run(options, console)
    except OtherRunError as error:
        console.print(f"--resume: {error}", style="red", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; --resume goes on from the last checkpoint, if one was written")
        return 130
    plot_curve(metrics, options.out / "loss.png")
    (options.out / "metrics.json").write_text(json.dumps(as_dict(metrics), indent=1) + "\n")
    files = [options.out / name for name in ("checkpoint.pt", "metrics.json", "loss.png", "sample.txt")]
    console.print(summary(metrics, files))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
