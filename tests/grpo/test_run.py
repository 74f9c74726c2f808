"""Runs in a folder: killed, resumed, damaged, begun from other weights; and what they log."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from jagg_core.files import PARTIAL, only_run_in
from jagg_core.grpo import GRPOTrainer, TrainingStopped, checkpoint, train
from jagg_core.grpo.checkpoint import DamagedCheckpoint
from jagg_core.grpo.command import main as command
from jagg_core.grpo.dry_run import estimate
from jagg_core.grpo.held_out import held_out, held_out_prompts
from jagg_core.grpo.learner import Learner
from jagg_core.grpo.log import Log, open_loggers, pictures_in, read_rows
from jagg_core.grpo.run import WriteFailed, read, write
from jagg_core.images import image_grid, png_bytes
from jagg_core.strict_json import plain
from tests.grpo.runs import SMALL, changed, differing, tensors, train_until_killed, weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Six updates without a break: the folder, and all that the last checkpoint holds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer = train(changed(run={"eval_every": 4, "eval_prompts": 2, "eval_samples": 1}), folder)
    torch.set_num_threads(threads)
    return folder, tensors(trainer)


def copied(whole: tuple[Path, dict[str, torch.Tensor]], to: Path) -> Path:
    shutil.copytree(whole[0], to / "run")
    return to / "run"


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path.name}"
        time.sleep(0.05)


def newest(folder: Path) -> Path:
    return checkpoint.checkpoints(folder / "checkpoints")[-1]


def test_killed_and_resumed_equals_without_a_break(whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=(0, str(folder), 5))
    child.start()
    child.join(timeout=200)
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in checkpoint.checkpoints(folder / "checkpoints")] == ["update-00000003"]
    assert len(read_rows(folder / "metrics.csv")) in (4, 5)  # the kill comes after the row of update 5 was handed over
    resumed = train(SMALL, folder, resume=True)
    assert differing(tensors(resumed), whole[1]) == []
    kept = [[row[key] for key in row if not key.endswith("_s")] for row in read_rows(folder / "metrics.csv")]
    ours = [[row[key] for key in row if not key.endswith("_s")] for row in read_rows(whole[0] / "metrics.csv")]
    assert kept == ours
    assert [row[0] for row in kept] == ["1", "2", "3", "4", "5", "6"]


def test_a_truncated_checkpoint_is_told_and_the_one_before_it_used(
    whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder = copied(whole, tmp_path)
    [shard] = newest(folder).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.warns(DamagedCheckpoint, match=rf"update-00000006: {shard.name} has \d+ bytes instead of \d+"):
        found = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    assert found.name == "update-00000003"
    (found / checkpoint.STATE).write_text("{")
    with pytest.warns(DamagedCheckpoint), pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        checkpoint.newest(folder / "checkpoints")


def test_nothing_in_a_checkpoint_is_pickled(whole: tuple[Path, dict[str, torch.Tensor]]) -> None:
    files = [path for path in newest(whole[0]).iterdir() if path.name != checkpoint.STATE]
    assert files
    for path in files:
        with safe_open(path, framework="pt") as shard:
            assert set(shard.keys()) == whole[1].keys()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for update in (1, 2, 3):
        checkpoint.save(tmp_path, update, {"a": torch.ones(2)}, {}, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["update-00000002", "update-00000003"]


def test_a_write_that_was_cut_off_is_no_checkpoint(tmp_path: Path) -> None:
    partial = tmp_path / ".partial-update-00000001"
    partial.mkdir()
    (partial / "left.safetensors").write_bytes(b"x")
    assert checkpoint.newest(tmp_path) is None
    found = checkpoint.save(tmp_path, 1, {"a": torch.ones(2)}, {}, keep=1)
    assert not partial.exists()
    assert "left.safetensors" not in checkpoint.read_state(found)["files"]


def test_a_checkpoint_without_the_optimizer_is_refused_but_can_start_a_new_run(tmp_path: Path) -> None:
    trainer = GRPOTrainer(SMALL)
    trainer.step()
    state = trainer.state()
    path = checkpoint.save(tmp_path / "old", 1, trainer.learner.tensors(optimizer=False), state, keep=1)
    with pytest.raises(ValueError, match=r"update-00000001: exp_avg/.* got none; .* start a new run with warm_start"):
        read(GRPOTrainer(SMALL), path)
    started = train(changed(run={"updates": 1}), tmp_path / "new", warm_start=path)
    assert started.learner.steps == 1
    assert (weights(started) - weights(trainer)).norm() < (weights(started) - weights(GRPOTrainer(SMALL))).norm()


def test_a_warm_start_takes_over_the_weights_alone(tmp_path: Path) -> None:
    trainer = GRPOTrainer(changed(model={"ema_decay": 0.0}))
    trainer.step()
    path = write(trainer, tmp_path / "old")
    with pytest.raises(ValueError, match=r"warm_start must be a checkpoint, such as .*: old: .*state\.json"):
        train(SMALL, tmp_path / "new", warm_start=path.parent)
    found: list[torch.Tensor] = []

    def note(self: Learner) -> None:
        begin(self)
        assert self.average is not None
        found.extend(tensor.clone() for tensor in (*self.masters.tensors, *self.average.tensors))

    begin = Learner.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "begin", note)
        train(changed(run={"updates": 1}), tmp_path / "new", warm_start=path)
    expected = 2 * trainer.learner.masters.tensors
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_restored_trainer_is_the_one_that_was_written(tmp_path: Path) -> None:
    trainer = GRPOTrainer(SMALL)
    trainer.step()
    trainer.skipped = 2
    path = write(trainer, tmp_path)
    found = GRPOTrainer(SMALL)
    read(found, path)
    assert (found.update, found.skipped, found.learner.steps) == (1, 2, 1)
    assert differing(tensors(found), tensors(trainer)) == []
    for one in (trainer, found):
        one.step()
    assert differing(tensors(found), tensors(trainer)) == []


def test_a_folder_with_a_run_is_not_overwritten_and_not_resumed_with_other_settings(
    whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder = copied(whole, tmp_path)
    with pytest.raises(ValueError, match="holds a run already; resume it with --resume"):
        train(SMALL, folder)
    with pytest.raises(ValueError, match=r"the run was begun with rollout.eta 0.7, got 0.3"):
        train(changed(rollout={"eta": 0.3}), folder, resume=True)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json is not the configuration of a run"):
        train(SMALL, folder, resume=True)


def test_a_finished_run_goes_on_for_more_updates(whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    free = {"updates": 7, "max_skipped": 9}
    longer = changed(run={"eval_every": 4, "eval_prompts": 2, "eval_samples": 1, **free})
    assert train(longer, folder, resume=True).update == 7
    assert json.loads((folder / "config.json").read_text())["run"]["updates"] == 7


def test_the_exported_weights_are_the_average(whole: tuple[Path, dict[str, torch.Tensor]]) -> None:
    found = load_file(whole[0] / "weights.safetensors")
    averages = {name.removeprefix("average/"): t for name, t in whole[1].items() if name.startswith("average/")}
    assert found.keys() == averages.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in averages.items())


def test_evaluations_are_logged(whole: tuple[Path, dict[str, torch.Tensor]]) -> None:
    [row] = read_rows(whole[0] / "evaluation.csv")
    assert row["update"] == "4"
    assert float(row["evaluation_s"]) > 0
    assert 0 < float(row["ink"]) < 1


def test_pictures_of_the_same_samples_are_drawn_and_change_no_number(
    whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = {"eval_every": 4, "eval_prompts": 2, "eval_samples": 1, "eval_rewards": ("sharpness",)}
    config = changed(run={**given, "samples_every": 4, "tensorboard": True})
    folder = tmp_path / "run"
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn = train(config, folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert differing(tensors(drawn), whole[1]) == []
    for name, own in (("metrics", set[str]()), ("evaluation", {"sharpness"})):
        numbers = [
            [{key: row[key] for key in row if not key.endswith("_s") and key not in own} for row in read_rows(path)]
            for path in (folder / f"{name}.csv", whole[0] / f"{name}.csv")
        ]
        assert numbers[0] == numbers[1] != []
    pictures = pictures_in(folder / "samples")
    assert list(pictures) == [0, 4, 6]
    assert json.loads((folder / "samples/prompts.json").read_text()) == held_out_prompts(drawn)
    first = held_out(GRPOTrainer(config), score=False).images
    assert first is not None
    assert pictures[0].read_bytes() == png_bytes(image_grid(first, 1))
    assert pictures[0].read_bytes() != pictures[6].read_bytes()
    found = EventAccumulator(str(folder / "events"))
    found.Reload()
    assert [event.step for event in found.Images("samples")] == [0, 4, 6]
    assert [event.step for event in found.Scalars("total_s")] == [1, 2, 3, 4, 5, 6]
    assert {event.value for event in found.Scalars("passes")} == {len(config.plan.knots)}
    [row] = read_rows(folder / "evaluation.csv")
    for name in ("ink", "sharpness", "evaluation_s"):
        [event] = found.Scalars(f"evaluation/{name}")
        assert (event.step, event.value) == (4, pytest.approx(float(row[name])))
    kept = {update: path.read_bytes() for update, path in pictures.items()}
    shutil.rmtree(newest(folder))  # killed after its fifth update
    train(config, folder, resume=True)
    assert {update: path.read_bytes() for update, path in pictures_in(folder / "samples").items()} == kept
    train(changed(config, run={"updates": 7, "samples_every": 0}), folder, resume=True)


def test_a_run_that_stops_keeps_its_log(tmp_path: Path) -> None:
    config = changed(reward={"name": "tests.grpo.runs:not_a_number"}, run={"max_skipped": 2})
    with pytest.raises(TrainingStopped):
        train(config, tmp_path)
    rows = read_rows(tmp_path / "metrics.csv")
    assert [(row["update"], row["skipped"], row["reward_mean"]) for row in rows] == [("1", "1", ""), ("2", "1", "")]
    assert all("nan for sample 0" in row["reason"] for row in rows)


def test_a_second_run_in_a_folder_ends_at_once_until_the_first_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with only_run_in(folder):  # one that is about to store its configuration
        with pytest.raises(ValueError, match=rf"another run is at work in {folder}: wait for its end or stop it"):
            train(SMALL, folder)
        assert [path.name for path in folder.iterdir()] == [".lock"]
    child = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=(0, str(folder), 1, True))
    child.start()
    try:
        wait_for(folder / "waiting", seconds=200)
        for resume in (False, True):
            with pytest.raises(ValueError, match="another run is at work"):
                train(SMALL, folder, resume=resume)
    finally:
        child.kill()
        child.join()
    with pytest.warns(UserWarning, match="holds no checkpoint, so the run begins anew"):
        assert train(changed(run={"updates": 1}), folder, resume=True).update == 1


def test_knots_are_searched_anew_and_a_resumed_run_has_them(tmp_path: Path) -> None:
    config = changed(
        rollout={"steps": 7}, plan={"knots": (0, 1), "recalibrate_every": 2}, run={"updates": 3, "checkpoint_every": 1}
    )
    trainer = train(config, tmp_path)
    [row] = read_rows(tmp_path / "recalibration.csv")
    assert (row["update"], row["knots_before"]) == ("2", "0 1")
    assert trainer.plan.knots == tuple(map(int, row["knots"].split())) != (0, 1)
    assert float(row["cosine"]) > float(row["cosine_before"])
    resumed = GRPOTrainer(config)
    read(resumed, newest(tmp_path))
    assert resumed.plan == trainer.plan
    shutil.rmtree(newest(tmp_path))  # a run killed in its third update searched those knots already
    train(config, tmp_path, resume=True)
    assert read_rows(tmp_path / "recalibration.csv") == [row]


def test_weights_of_any_memory_layout_are_written_and_restored(tmp_path: Path) -> None:
    config = changed(
        model={"backbone": "tests.grpo.convolutions:channels_last"},
        reward={"name": "redness"},
        run={"updates": 3, "checkpoint_every": 1},
    )
    whole = train(config, tmp_path / "whole")
    layouts = {name: tensor.is_contiguous() for name, tensor in whole.learner.tensors().items() if tensor.ndim > 1}
    assert len(layouts) == 2 * 4 and not any(layouts.values())
    train(changed(config, run={"updates": 2}), tmp_path / "run")
    resumed = train(config, tmp_path / "run", resume=True)
    assert differing(tensors(resumed), tensors(whole)) == []
    exported = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(exported[name], tensors(whole)[f"average/{name}"]) for name in whole.learner.names)


@pytest.mark.parametrize("updates", [1, 3])
def test_a_full_disk_ends_a_run_with_one_line_and_leaves_nothing_half_written(updates: int, tmp_path: Path) -> None:
    """A limit on file sizes that a checkpoint exceeds, from the first one on or after one was written."""
    folder = tmp_path / "run"
    if updates > 1:
        train(changed(run={"updates": 1}), folder)
    code = (
        "import resource\nfrom jagg_core.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"main({train_arguments(folder, updates)!r})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    told = found.stderr.splitlines()[-1]
    assert f"stopped: {folder} cannot be written: " in told and "File too large" in told
    whole = folder / "checkpoints" / "update-00000001"
    assert told.endswith(f"the newest whole checkpoint is {whole}" if updates > 1 else "no checkpoint yet")
    assert list(folder.rglob(f"{PARTIAL}*")) == []
    if updates > 1:
        assert train(changed(run={"updates": updates}), folder, resume=True).update == updates


def train_arguments(folder: Path, updates: int) -> list[str]:
    """`SMALL` for the command line, resumed."""
    config = folder.with_name("config.json")
    config.write_text(json.dumps(plain(asdict(changed(run={"updates": updates})))))
    return ["train", "--config", str(config), "--out", str(folder), "--resume"]


def test_what_a_killed_run_left_half_written_is_removed_at_the_next_start(
    whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder = copied(whole, tmp_path)
    (folder / "checkpoints" / f"{PARTIAL}update-00000009").mkdir()
    (folder / f"{PARTIAL}12345678-weights.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="holds a run already"):
        train(SMALL, folder)
    assert list(folder.rglob(f"{PARTIAL}*")) == []


def test_a_log_that_cannot_be_written_names_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Log.add

    def full(self: Log, row: dict[str, Any]) -> None:
        if row["update"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        add(self, row)

    monkeypatch.setattr(Log, "add", full)
    told = (
        r"run cannot be written: .*No space left on device: .*metrics.csv.*; the newest whole .* is .*update-00000001"
    )
    with pytest.raises(WriteFailed, match=told):
        train(changed(run={"updates": 3, "checkpoint_every": 1}), tmp_path / "run")


class TestLog:
    def test_rows_after_the_checkpoint_are_dropped(self, tmp_path: Path) -> None:
        log = Log(tmp_path / "metrics.csv", 0)
        for update in (1, 2, 3):
            log.add({"update": update, "reward": update / 10, "norm": None})
        again = Log(tmp_path / "metrics.csv", 2)
        assert (tmp_path / "metrics.csv").read_bytes() == b"update,reward,norm\n1,0.1,\n2,0.2,\n"
        again.add({"update": 3, "reward": 0.5, "norm": None})
        assert (tmp_path / "metrics.csv").read_bytes().endswith(b"2,0.2,\n3,0.5,\n")
        Log(tmp_path / "metrics.csv", 2)
        assert [(row["update"], row["reward"], row["norm"]) for row in read_rows(tmp_path / "metrics.csv")] == [
            ("1", "0.1", ""),
            ("2", "0.2", ""),
        ]

    def test_a_line_that_a_kill_cut_off_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        for rest in ("2", "2\0\0\0", "\0\0"):
            path.write_text(f"update,reward\n1,0.5\n{rest}")
            assert read_rows(path) == [{"update": "1", "reward": "0.5"}]
        path.write_text('update,reason,total_s\n1,a,2\n2,"its first line\n')
        assert [row["update"] for row in read_rows(path)] == ["1"]

    @pytest.mark.parametrize(
        "content",
        [
            b"\xef\xbb\xbfupdate,norm,reason\n1,0.5,\n2,1e-05,a; b\n",
            b"update,norm,reason\r\n1,0.5,\r\n2,1e-05,a; b\r\n",
            b"update,norm,reason\n1.0,0.5,\n2.0,1e-05,a; b",
            b'update;norm;reason\n1;0,5;\n2;1e-05;"a; b"\n',
            b'update;norm;reason;;\n1,0;0.5;;;\n;;;;\n\n2;1e-05;"a; b";;\n',
            b"update\tnorm\treason\n1\t0,5\t\n2\t1e-05\ta; b\n",
            "update\tnorm\treason\n1\t0.5\t\n2\t1e-05\ta; b\n".encode("utf-16"),
        ],
        ids=["bom", "windows", "decimals", "semicolons", "empty columns", "tabs", "utf-16"],
    )
    def test_a_log_that_a_spreadsheet_stored_keeps_its_rows(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        path.write_bytes(content)
        rows = [
            {"update": "1", "norm": "0.5", "reason": ""},
            {"update": "2", "norm": "1e-05", "reason": "a; b"},
        ]
        assert read_rows(path) == rows
        Log(path, 2).add({"update": 3, "norm": 0.25, "reason": ""})
        assert path.read_text() == "update,norm,reason\n1,0.5,\n2,1e-05,a; b\n3,0.25,\n"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"update,norm\n1,0.5\n\0\0\n2,0.5\n", "must be a table, got a NUL in line 3"),
            (b"update,norm\n1,0.5\n2\n3,0.5\n", "line 3: must have 2 fields, got 1"),
            (b"update,norm\n1,0.5,7\n", "line 2: must have 2 fields, got 3"),
            (b"update,norm\n1,0.5\ntotal,0.5\n", "line 3: update must be a whole number, got 'total'"),
            (b"update,norm\n1.5,0.5\n", "line 2: update must be a whole number, got '1.5'"),
            (b"1,0.5\n2,0.5\n", r"one of them update, got \['1', '0.5'\]"),
            (b"update,norm,norm\n1,2,3\n", "must begin with different names of columns"),
            (b"update,reason\n1,caf\xe9\n", "must be a table in UTF-8"),
        ],
    )
    def test_a_log_that_cannot_be_read_is_named_and_stays(self, content: bytes, message: str, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{path}.*{message}"):
            Log(path, 9)
        assert path.read_bytes() == content

    def test_an_empty_log_has_no_rows(self, tmp_path: Path) -> None:
        for content in (b"", b"\n", b"\xef\xbb\xbf", b"update,norm\n", b";;\n", b"\0\0"):
            (tmp_path / "metrics.csv").write_bytes(content)
            assert read_rows(tmp_path / "metrics.csv") == []

    def test_event_files_hold_the_same_figures(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        [events] = open_loggers(tmp_path, changed(run={"tensorboard": True}).run, 0)
        logs = [
            Log(tmp_path / "metrics.csv", 0, [events]),
            Log(tmp_path / "evaluation.csv", 0, [events], "evaluation/"),
        ]
        for update in (1, 2):
            logs[0].add({"update": update, "reward": update / 4, "norm": None})
            logs[1].add({"update": update, "ink": update / 8})
        events.close()
        found = EventAccumulator(str(tmp_path / "events"))
        found.Reload()
        assert found.Tags()["scalars"] == ["reward", "evaluation/ink"]
        assert [(event.step, event.value) for event in found.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
        assert [(event.step, event.value) for event in found.Scalars("evaluation/ink")] == [(1, 0.125), (2, 0.25)]


class TestDryRun:
    CONFIG = changed(
        rollout={"prompts": 4, "samples": 4},
        run={"updates": 6, "eval_every": 2, "samples_every": 3, "eval_prompts": 2, "eval_samples": 1},
    )

    @pytest.mark.parametrize(
        ("plan", "epochs"), [({}, 1), ({}, 2), ({"upstream": "interpolated"}, 2), ({"upstream": "autograd"}, 1)]
    )
    def test_counts_are_those_of_the_run(self, plan: dict[str, Any], epochs: int, tmp_path: Path) -> None:
        config = changed(self.CONFIG, plan=plan, optimizer={"epochs": epochs})
        found = estimate(config, tmp_path / "run")
        metrics = GRPOTrainer(config).step()
        assert found.passes == metrics.passes
        size = config.rollout.micro_batch
        assert found.update_forwards == size * metrics.forwards
        assert found.update_backwards == size * metrics.micro_batches * metrics.passes
        assert found.seconds == pytest.approx(6 * found.update_s + 5 * found.look_s)
        assert found.looks == 5  # after 0, 2, 3, 4 and 6 updates
        assert list(tmp_path.iterdir()) == []

    def test_sizes_are_those_of_the_files(self, whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
        found = estimate(SMALL, tmp_path)
        shards = sum(path.stat().st_size for path in newest(whole[0]).glob("*.safetensors"))
        assert found.checkpoint_bytes == pytest.approx(shards, rel=0.02)
        assert found.weights_bytes == pytest.approx((whole[0] / "weights.safetensors").stat().st_size, rel=0.02)

    def test_the_command_prints_it_and_writes_nothing(
        self, whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(plain(asdict(SMALL))))
        words = ["--config", str(config), "--dry-run", "--out"]
        command([*words, str(tmp_path / "run")])
        text = capsys.readouterr().out
        assert text.startswith("passes              2 of 4 trained steps\n") and len(text.splitlines()) == 7
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
        with pytest.raises(SystemExit):
            command([*words, str(whole[0])])
        assert "holds a run already" in capsys.readouterr().err
