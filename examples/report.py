"""What a run leaves behind: a loss curve, its figures, and a table on the console."""

from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot


@dataclass(frozen=True)
class Metrics:
    """The figures of a run; all bits per byte but the training curve are of held-out documents."""

    mixer: str
    route: str
    device: str
    threads: int
    python: str
    torch: str
    seed: int
    parameters: int
    train_bytes: int
    held_out_bytes: int
    count_model_bits_per_byte: float
    before_bits_per_byte: float
    after_bits_per_byte: float
    steps: int
    training_seconds: float
    bytes_seen: int
    bytes_per_second: float
    curve: list[float]  # bits per byte of each step's training batch


def plot_curve(metrics: Metrics, path: Path) -> None:
    """The training curve, the held-out figure before and after, and the count model's level, as a PNG."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(metrics.curve) + 1)
    axes.plot(steps, metrics.curve, color="C0", linewidth=1, label="training batch")
    held_out = [metrics.before_bits_per_byte, metrics.after_bits_per_byte]
    axes.plot([0, metrics.steps], held_out, "o", color="C1", label="held out, before and after")
    level = metrics.count_model_bits_per_byte
    axes.axhline(level, color="C2", linestyle="--", label=f"order-2 count model, held out ({level:.2f})")
    axes.annotate(f"{held_out[1]:.2f}", (metrics.steps, held_out[1]), (0, 8), textcoords="offset points", ha="center")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None), title=f"{metrics.mixer} on {metrics.device}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def summary(metrics: Metrics, files: list[Path]) -> Table:
    """The closing table."""
    table = Table(show_header=False, title="train_bytes")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("order-2 count model", f"{metrics.count_model_bits_per_byte:.3f} held-out bits per byte")
    table.add_row("before training", f"{metrics.before_bits_per_byte:.3f}")
    table.add_row("after training", f"{metrics.after_bits_per_byte:.3f}")
    table.add_row("training", f"{metrics.training_seconds:.1f} s, {metrics.steps} steps")
    table.add_row("speed", f"{metrics.bytes_per_second:,.0f} bytes/s on {metrics.device}, {metrics.threads} threads")
    table.add_row("route", metrics.route)
    table.add_row("files", "\n".join(map(str, files)))
    return table


def as_dict(metrics: Metrics) -> dict[str, object]:
    """The figures with their names, ready for JSON."""
    return asdict(metrics)
