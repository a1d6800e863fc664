"""The demo's loop: it learns, a cut run goes on as if never cut, and the command leaves its files."""

import json
from pathlib import Path

import pytest
import torch
import train_bytes
from corpus import load_corpus
from model import ByteModel, ModelConfig
from optim import DECAY_FROM, WARMUP_STEPS, learning_rate_factor, orthogonalised
from training import OtherRunError, Trainer, TrainingOptions, bits_per_byte

DOCUMENTS = [b"the cat sat on the mat. " * 3, b"a dog ate the log. " * 4, b"so it is. " * 5, b"ends", b"x"]


def make_trainer(config: ModelConfig, seed: int = 0, steps: int = 6) -> Trainer:
    torch.manual_seed(seed)
    options = TrainingOptions(steps, seconds=float("inf"), bytes_per_batch=96, seed=seed, checkpoint_every=2)
    return Trainer(ByteModel(config), options, torch.device("cpu"))


def ignore(trainer: Trainer) -> None:
    """Watches nothing."""


def cut_at_step_5(trainer: Trainer) -> None:
    """A user who interrupts."""
    if trainer.step == 5:
        raise KeyboardInterrupt


def test_a_resumed_run_equals_an_uninterrupted_one(tiny: ModelConfig, tmp_path: Path) -> None:
    whole = make_trainer(tiny)
    whole.train(DOCUMENTS, tmp_path / "whole.pt", ignore)
    cut = tmp_path / "cut.pt"
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tiny).train(DOCUMENTS, cut, cut_at_step_5)
    resumed = make_trainer(tiny)
    resumed.load(cut)
    assert resumed.step == 4  # the last step that was saved
    resumed.train(DOCUMENTS, cut, ignore)
    assert resumed.step == whole.step == 6
    assert resumed.curve == whole.curve
    assert resumed.bytes_seen == whole.bytes_seen
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.pt", "whole.pt"]


def test_a_checkpoint_of_another_run_is_refused(tiny: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    make_trainer(tiny).save(path)
    with pytest.raises(OtherRunError, match="seed 0 instead of 1"):
        make_trainer(tiny, seed=1).load(path)


def test_training_learns(tiny: ModelConfig, tmp_path: Path) -> None:
    trainer = make_trainer(tiny, steps=25)
    device = torch.device("cpu")
    before = bits_per_byte(trainer.model, DOCUMENTS, 96, device)
    trainer.train(DOCUMENTS, tmp_path / "checkpoint.pt", ignore)
    assert before == pytest.approx(8.0, abs=0.01)
    assert bits_per_byte(trainer.model, DOCUMENTS, 96, device) < 4.0


def test_bits_per_byte_do_not_depend_on_the_packing(tiny: ModelConfig, tmp_path: Path) -> None:
    trainer = make_trainer(tiny)
    trainer.train(DOCUMENTS, tmp_path / "checkpoint.pt", ignore)
    figures = [bits_per_byte(trainer.model, DOCUMENTS, limit, torch.device("cpu")) for limit in (1, 100, 10_000)]
    assert figures == pytest.approx([figures[0]] * 3, rel=1e-5)


def test_the_schedule_ends_at_zero_by_whichever_limit_is_nearer(tiny: ModelConfig) -> None:
    assert learning_rate_factor(0, 0.0) == pytest.approx(1 / WARMUP_STEPS)
    assert learning_rate_factor(WARMUP_STEPS, DECAY_FROM) == pytest.approx(1.0)
    assert learning_rate_factor(1000, (1 + DECAY_FROM) / 2) == pytest.approx(0.5)
    assert learning_rate_factor(1000, 1.2) == 0.0
    trainer = make_trainer(tiny)
    trainer.options = TrainingOptions(10, seconds=8.0, bytes_per_batch=96, seed=0, checkpoint_every=1)
    trainer.step, trainer.seconds = 5, 6.0
    assert trainer.progress == 0.75


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_orthogonalised_levels_the_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3


def test_the_command_end_to_end(tiny: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_bytes, "ModelConfig", lambda mixer: tiny)
    texts = {f"topic {index}": f"Line {index} is like the others.\n\nBut {index * index}!" * 9 for index in range(20)}
    corpus = load_corpus(texts)
    assert corpus.train and corpus.held_out
    monkeypatch.setattr(train_bytes, "load_corpus", lambda: corpus)
    out = tmp_path / "demo"
    common = ["--out", str(out), "--device", "cpu", "--batch", "2048", "--seconds", "0", "--sample-bytes", "8"]
    assert train_bytes.main([*common, "--steps", "3"]) == 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "sample.txt").read_bytes()) == len(train_bytes.PROMPT) + 8
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["steps"] == len(metrics["curve"]) == 3
    op = {"rwkv7": "dplr_delta_rule"}.get(tiny.mixer, tiny.mixer)
    assert f"/{op}/" in metrics["route"]
    assert metrics["after_bits_per_byte"] < metrics["before_bits_per_byte"]
    assert train_bytes.main([*common, "--steps", "4", "--resume"]) == 0
    assert json.loads((out / "metrics.json").read_text())["steps"] == 4


def test_resume_without_a_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_bytes.main(["--resume", "--out", str(tmp_path)]) == 2
    assert "there is no" in capsys.readouterr().out
