"""Checkpoints are whole or not there; a damaged one is named and passed over only on request."""

import json
import pickletools
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import store
from paceline.checkpoint.host import HostCopy
from paceline.records import UserError

FILES = ["drafter.safetensors", "manifest.json", "optimizer.safetensors", "state.json"]


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    weight = {"fc.weight": torch.randn(5, 7, generator=draw), "norm.weight": torch.randn(7, generator=draw)}
    return {"drafter": weight, "optimizer": {"step.norm.weight": torch.tensor(3.0 + seed)}}


def save(run: Path, steps: int, *, best: bool = False, state: dict[str, Any] | None = None) -> None:
    copies = {name: HostCopy(group) for name, group in tensors(steps).items()}
    for name, copy in copies.items():
        copy.take(tensors(steps)[name])
    store.write(run, steps, copies, state or {"settings": {"a": 1}}, best=best)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints after 2, 4 and 6 steps."""
    for steps in (2, 4, 6):
        save(tmp_path, steps)
    return tmp_path


def newest(run: Path, *, previous: bool = False) -> tuple[store.Saved | None, list[str]]:
    told: list[str] = []
    return store.newest(run, previous=previous, tell=told.append), told


def test_what_is_saved_comes_back_bit_for_bit(run: Path) -> None:
    saved, told = newest(run)
    assert saved is not None
    assert (saved.steps, saved.state, told) == (6, {"settings": {"a": 1}, "format": 2, "steps": 6}, [])
    found = {(file, name): tensor for file, name, tensor in saved.tensors()}
    want = {(file, name): tensor for file, group in tensors(6).items() for name, tensor in group.items()}
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)
    assert load_file(saved.folder / "drafter.safetensors").keys() == tensors(6)["drafter"].keys()


def test_a_copy_in_several_pieces_is_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tensors(1)["drafter"]
    whole, pieces = HostCopy(group), []
    monkeypatch.setattr("paceline.checkpoint.host._PIECE", 4)
    pieces = HostCopy(group)
    for name, copy in (("whole", whole), ("pieces", pieces)):
        copy.take(group)
        copy.write(tmp_path / name)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    assert pieces.nbytes == (tmp_path / "pieces").stat().st_size


def test_codes_of_a_byte_come_back_beside_floats_which_are_aligned(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    codes = {name: torch.randint(256, (5, 7), generator=draw, dtype=torch.uint8) for name in ("a", "c")}
    group = {**codes, "b": torch.randn(3, generator=draw), "d": torch.tensor(2.0)}
    copy = HostCopy(group)
    copy.take(group)
    copy.write(tmp_path / "mixed")
    found = load_file(tmp_path / "mixed")
    assert found.keys() == group.keys()
    assert all(torch.equal(found[name], group[name]) and found[name].dtype == group[name].dtype for name in group)
    text = (tmp_path / "mixed").read_bytes()
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    assert [(8 + size + header[name]["data_offsets"][0]) % 4 for name in ("b", "d")] == [0, 0]


def test_nothing_is_pickled(run: Path) -> None:
    for path in (run / "checkpoints" / "step-00000006").iterdir():
        assert path.name in FILES
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "first byte": lambda path: flip(path, 0),
    "middle": lambda path: flip(path, path.stat().st_size * 4),
    "last bit": lambda path: flip(path, path.stat().st_size * 8 - 1),
}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_one_before_used_on_request(run: Path, file: str, how: str) -> None:
    place = run / "checkpoints" / "step-00000006"
    DAMAGES[how](place / file)
    named = file.removesuffix(".json")  # a damaged manifest may blame a file that is whole
    sentence = (
        rf"^Checkpoint {place} is damaged: .*{named}.*\. The one after step 4 is whole: go on from there with "
        rf"`paceline train {run} --resume-previous`\.$"
    )
    with pytest.raises(UserError, match=sentence):
        newest(run)
    saved, told = newest(run, previous=True)
    assert saved is not None
    assert saved.steps == 4
    assert re.match(
        rf"  Checkpoint {place} is damaged: .*{named}.* Going on from the one after step 4\.$",
        told[0],
    )


def test_any_flipped_bit_of_a_manifest_is_found(run: Path) -> None:
    place = run / "checkpoints" / "step-00000006"
    path = place / "manifest.json"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        flip(path, bit)
        with pytest.raises(UserError, match="is damaged|has format"):
            newest(run)
        path.write_bytes(whole)
    assert newest(run)[0] is not None


@pytest.mark.parametrize("text", ["", "step-00000006\n", "../elsewhere", "step-00000009", None])
def test_a_pointer_that_names_no_checkpoint(run: Path, text: str | None) -> None:
    pointer = run / "checkpoints" / "latest"
    pointer.unlink() if text is None else pointer.write_text(text)
    with pytest.raises(UserError, match=r"The one after step 6 is whole: go on from there"):
        newest(run)
    saved, told = newest(run, previous=True)
    assert saved is not None
    assert (saved.steps, len(told)) == (6, 1)


def test_when_none_is_whole(run: Path) -> None:
    for steps in (2, 4, 6):
        flip(run / "checkpoints" / f"step-{steps:08d}" / "state.json", 5)
    for previous in (False, True):
        with pytest.raises(UserError, match=r"step-00000006 is damaged.*no older one that is whole"):
            newest(run, previous=previous)


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    (tmp_path / "checkpoints").mkdir()
    assert newest(tmp_path) == (None, [])


def test_another_format_is_said(run: Path) -> None:
    path = run / "checkpoints" / "step-00000006" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(UserError, match="has format 1, and this paceline reads 2"):
        newest(run)


@pytest.mark.parametrize(
    ("line", "keep", "stay"),
    [
        ([2, 4, 6], 2, [4, 6]),
        ([2, 4, 6], 1, [6]),
        ([2, 4, 6], 9, [2, 4, 6]),
        ([2, 4], 1, [4]),  # 6 was passed over, and the run has not come so far yet
        ([2, 6], 2, [2, 6]),  # 4 was
        ([1, 2, 3, 6], 2, [2, 6]),  # 1 and 3 are gone
    ],
)
def test_the_newest_stay_and_none_that_was_passed_over(run: Path, line: list, keep: int, stay: list) -> None:
    assert store.prune(run, line, keep) == stay
    assert store.saved_steps(run) == stay
    assert not list((run / "checkpoints").glob(".*"))


def test_the_best_stays_too(run: Path) -> None:
    save(run, 8, best=True)
    for steps in (10, 12, 14):
        save(run, steps)
        store.prune(run, [8, steps - 2, steps], 2)
        assert store.saved_steps(run) == sorted({8, steps - 2, steps})
    save(run, 16, best=True)
    store.prune(run, [14, 16], 1)
    assert store.saved_steps(run) == [16], "the best before it goes"


@pytest.mark.parametrize("text", ["", "step-4", "step-00000009", None])
def test_a_pointer_to_no_best_lets_none_stay(run: Path, text: str | None) -> None:
    if text is not None:
        (run / "checkpoints" / "best").write_text(text)
    store.prune(run, [2, 4, 6], 1)
    assert store.saved_steps(run) == [6]


def test_the_best_is_pointed_at_where_it_is_there(run: Path) -> None:
    pointer = run / "checkpoints" / "best"
    assert store.point_best(run, 4)
    assert pointer.read_text() == "step-00000004"
    assert store.named(run, "best", ["drafter.safetensors"]).steps == 4
    for gone in (5, None):
        store.point_best(run, 4)
        assert not store.point_best(run, gone)
        assert not pointer.exists()
    assert not store.point_best(run / "elsewhere", None)


class Killed(BaseException):
    """No handler of errors sees it."""


OPERATIONS = (("os", "fsync"), ("pathlib.Path", "rename"), ("pathlib.Path", "mkdir"), ("shutil", "rmtree"))


@pytest.mark.parametrize("first", [False, True])
def test_any_operation_on_the_disk_may_be_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """A save of a best state that is killed leaves the state before it, or itself, and a best that is whole."""
    for call in range(99):
        run, count = tmp_path / f"killed-{call}", [0]
        if not first:
            save(run, 2, best=True)
            save(run, 4)
            save(run, 6)
            store.prune(run, [2, 4, 6], 1)
        with monkeypatch.context() as patch:
            for module, name in OPERATIONS:
                whole = getattr(pkgutil.resolve_name(module), name)

                def last(*args: Any, whole: Any = whole, call: int = call, count: Any = count, **more: Any) -> Any:
                    count[0] += 1
                    if count[0] > call:
                        raise Killed
                    return whole(*args, **more)

                patch.setattr(f"{module}.{name}", last)
            try:
                save(run, 8, best=True)
                store.prune(run, [2, 6, 8], 1)
                ended = True
            except Killed:
                ended = False
        if ended:
            break
        store.sweep(run)
        saved, told = newest(run)
        assert told == []
        steps = saved.steps if saved else None
        assert steps in ((None, 8) if first else (6, 8)), call
        # As who goes on does: what the checkpoint says of the best is what is pointed at.
        best = {None: None, 6: 2, 8: 8}[steps]
        assert store.point_best(run, best) == (best is not None)
        if best is not None:
            assert store.named(run, "best", ["drafter.safetensors"]).steps == best
    assert call > 15


def test_a_checkpoint_by_its_name(run: Path) -> None:
    needed = ["drafter.safetensors"]
    assert [store.named(run, name, needed).steps for name in ("latest", "2", "000004")] == [6, 2, 4]
    which = r" There are checkpoints after step 2, 4, 6\."
    for name, sentence in (
        ("5", r"^There is no checkpoint after step 5 in .*checkpoints\." + which),
        (
            "best",
            r"^There is no best checkpoint in .*"
            + which
            + " A run has a best one once evaluate.held_out or evaluate.device is set",
        ),
        ("newest", "^A checkpoint is named latest, best or by its number of steps, got 'newest'." + which),
        ("-1", "got '-1'"),
        ("²", "got '²'"),
        ("../latest", "got '../latest'"),
        ("", "got ''"),
    ):
        with pytest.raises(UserError, match=sentence):
            store.named(run, name, needed)
    for name in ("latest", "best", "4"):
        with pytest.raises(UserError, match=r"There is no .* in .*none/checkpoints\. There is none\."):
            store.named(run / "none", name, needed)


@pytest.mark.parametrize("text", ["", "step-00000009", "../../elsewhere", b"\xff"])
def test_a_damaged_best_is_named(run: Path, text: str | bytes) -> None:
    pointer = run / "checkpoints" / "best"
    pointer.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"best.*|Checkpoint .*step-00000009 is damaged: manifest.json cannot") as told:
        store.named(run, "best", ["drafter.safetensors"])
    assert "There are checkpoints after step 2, 4, 6. Name another." in str(told.value)
    assert newest(run)[0] is not None, "what a run goes on from does not depend on it"


@pytest.mark.parametrize("how", DAMAGES)
def test_only_the_files_that_are_needed_are_compared(run: Path, how: str) -> None:
    store.point_best(run, 4)
    place = run / "checkpoints" / "step-00000004"
    DAMAGES[how](place / "optimizer.safetensors")
    assert store.named(run, "best", ["drafter.safetensors"]).steps == 4
    DAMAGES[how](place / "drafter.safetensors")
    with pytest.raises(UserError, match=rf"^Checkpoint {place} is damaged: .*drafter\.safetensors .* Name another"):
        store.named(run, "best", ["drafter.safetensors"])


@pytest.mark.parametrize(
    ("keep", "good", "stay"),
    [
        (2, 7, [4, 6]),
        (2, 6, [4, 6]),
        (2, 5, [4, 6]),
        (2, 3, [2, 6]),  # in the place of 4
        (1, 5, [4, 6]),  # one more than is kept
        (1, 1, [6]),  # there is none
        (3, 2, [2, 4, 6]),
        (1, 6, [6]),
    ],
)
def test_the_last_good_one_stays(run: Path, keep: int, good: int, stay: list[int]) -> None:
    assert store.prune(run, [2, 4, 6], keep, good=good) == stay
    assert store.saved_steps(run) == stay


def test_the_newest_whole_one_from_before_is_found(run: Path) -> None:
    told: list[str] = []

    def before(steps: int, line: Sequence[int] = (2, 4, 6)) -> int | None:
        saved = store.newest_before(run, line, steps, tell=told.append)
        return saved and saved.steps

    assert [before(steps) for steps in (1, 2, 3, 4, 5, 6, 99)] == [None, 2, 2, 4, 4, 6, 6]
    assert before(5, [2, 6]) == 2, "the one after step 4 was passed over"
    assert told == []
    flip(run / "checkpoints" / "step-00000004" / "optimizer.safetensors", 99)
    assert before(5) == 2
    assert len(told) == 1
    assert "step-00000004 is damaged: the sha256 of optimizer.safetensors" in told[0]


@pytest.mark.parametrize("text", ["step-00000006", "step-00000004", "", None])
def test_who_goes_on_makes_what_it_goes_on_from_the_newest(run: Path, text: str | None) -> None:
    pointer = run / "checkpoints" / "latest"
    pointer.unlink() if text is None else pointer.write_text(text)
    store.point_latest(run, 4)
    saved, told = newest(run)
    assert saved is not None
    assert (saved.steps, told, store.saved_steps(run)) == (4, [], [2, 4, 6])


def test_a_run_that_was_killed_between_its_first_save_and_the_pointer_goes_on_from_it(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "checkpoints" / "latest").unlink()
    saved, told = newest(tmp_path)
    assert saved is not None
    assert (saved.steps, told) == (4, [])
    flip(saved.folder / "state.json", 5)
    with pytest.raises(UserError, match=r"step-00000004 is damaged.*no older one"):
        newest(tmp_path)


def test_what_was_not_finished_is_swept(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / ".step-00000008.123").mkdir()
    (folder / ".step-00000008.123" / "state.json").write_text("")
    (folder / ".latest.new").write_text("")
    store.sweep(run)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *(f"step-0000000{n}" for n in (2, 4, 6))]


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that was still due after the step of a checkpoint may make it the best, and it is written once more."""
    rename = Path.rename
    for killed_at in range(4):  # what was there aside, the new one into its place, `best`, `latest`
        names = []

        def renamed(path: Path, to: Path, killed_at: int = killed_at, names: list[Path] = names) -> Path:
            if path.name.endswith(".json.new") or path.parent.name != "checkpoints":
                return rename(path, to)
            names.append(path)
            if len(names) > killed_at:
                raise KeyboardInterrupt
            return rename(path, to)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", renamed)
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
            with pytest.raises(KeyboardInterrupt):
                save(run, 6, best=True)
        store.sweep(run)
        saved, told = newest(run)
        assert saved is not None
        assert (saved.steps, told) == (6, []), killed_at
        assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
            f"step-0000000{n}" for n in (2, 4, 6)
        ]


def test_a_failing_write_leaves_what_was_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in range(20):  # whichever sync fails
        count = [0]

        def full(handle: int, call: int = call, count: list[int] = count) -> None:
            count[0] += 1
            if count[0] > call:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            try:
                save(run, 8)
            except OSError:
                saved, _ = newest(run)
                assert saved is not None
                assert saved.steps == (8 if (run / "checkpoints" / "latest").read_text().endswith("8") else 6)
                assert not list((run / "checkpoints").glob(".step*"))
            else:
                break
    else:
        pytest.fail("more syncs than expected")
    assert call >= 6


def test_those_that_are_needed_besides_stay(run: Path) -> None:
    assert store.prune(run, [2, 4, 6], 1, also=[2, 99]) == [6]
    assert store.saved_steps(run) == [2, 6]


def test_what_the_newest_name_stays(run: Path) -> None:
    """Whichever of them a run goes on from; a state that cannot be read names nothing."""
    for steps, named in ((8, 2), (10, 4), (12, 12)):
        save(run, steps, state={"best": {"steps": named}, "evaluation": {"pending": {"steps": named}}})
    line = [2, 4, 6, 8, 10, 12]
    store.prune(run, line, 3)
    assert store.saved_steps(run) == [2, 4, 8, 10, 12]
    store.prune(run, line, 2)
    assert store.saved_steps(run) == [4, 10, 12]
    flip(run / "checkpoints" / "step-00000010" / "state.json", 5)
    store.prune(run, line, 2)
    assert store.saved_steps(run) == [10, 12]


def test_of_a_state_that_does_not_say_all_before_it_are_its_line(run: Path) -> None:
    saved, _ = newest(run)
    assert saved is not None
    assert saved.line() == [2, 4, 6]
    save(run, 8, state={"line": [2, 6]})
    saved, _ = newest(run)
    assert saved is not None
    assert saved.line() == [2, 6, 8]
