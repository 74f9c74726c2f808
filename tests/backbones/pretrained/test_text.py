"""Encoded prompts: once per prompt and folder, kept on disk, padded and masked in batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jagg_core.backbones.pretrained import text as text_module
from jagg_core.backbones.pretrained.text import Text, TextBatch, TextStore, cache_folder


class Encoder:
    """Counts how often it is loaded and what it is asked."""

    def __init__(self) -> None:
        self.loads = 0
        self.asked: list[str] = []

    def __call__(self) -> Callable[[str], Text]:
        self.loads += 1

        def encode(prompt: str) -> Text:
            self.asked.append(prompt)
            return Text(torch.full((len(prompt), 3), float(len(prompt))), torch.arange(2.0))

        return encode


def test_a_prompt_is_encoded_once(tmp_path: Path) -> None:
    encoder = Encoder()
    store = TextStore(["model"], encoder, (), tmp_path)
    first = store(["aa", "b", "aa"])
    assert [len(text.tokens) for text in first] == [2, 1, 2]
    assert (encoder.loads, encoder.asked) == (1, ["aa", "b"])
    store(["b"])
    again = TextStore(["model"], encoder, (), tmp_path)(["aa", "b"])
    assert encoder.loads == 1
    assert torch.equal(again[0].tokens, first[0].tokens)
    assert again[1].pooled is not None and torch.equal(again[1].pooled, torch.arange(2.0))
    TextStore(["another"], encoder, (), tmp_path)(["aa"])
    assert encoder.loads == 2


def test_the_pool_is_encoded_with_the_first_prompt(tmp_path: Path) -> None:
    encoder = Encoder()
    store = TextStore(["model"], encoder, ["aa", "bbb", "c", "c"], tmp_path)
    assert [len(text.tokens) for text in store(["bbb"])] == [3]
    assert (encoder.loads, encoder.asked) == (1, ["bbb", "aa", "c"])
    store(["c", "aa"])
    assert encoder.loads == 1
    store(["new"])
    assert (encoder.loads, encoder.asked[3:]) == (2, ["new"])


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "KEPT", 2)
    encoder = Encoder()
    store = TextStore(["model"], encoder, (), tmp_path)
    assert [len(text.tokens) for text in store(["a", "bb", "ccc", "a"])] == [1, 2, 3, 1]
    assert len(store._recent) == 2
    assert [len(text.tokens) for text in store(["a", "bb", "ccc"])] == [1, 2, 3]
    assert encoder.loads == 1


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a file where the folder should be")
    store = TextStore(["model"], Encoder(), (), tmp_path)
    with pytest.warns(UserWarning, match="encoded prompts cannot be kept in"):
        assert len(store(["aa"])[0].tokens) == 2


def test_a_user_without_a_home_has_prompts_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container that runs under a number alone: the encoders load once all the same."""
    for name in ("HOME", "JAGG_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert cache_folder() is None
    monkeypatch.setattr(text_module, "KEPT", 1)
    encoder = Encoder()
    store = TextStore(["model"], encoder, ("ccc",), None)
    with pytest.warns(UserWarning, match="cannot be kept on disk: this user has no home folder; set JAGG_CACHE"):
        assert [len(text.tokens) for text in store(["a", "bb"])] == [1, 2]
    assert [len(text.tokens) for text in store(["ccc", "a", "bb"])] == [3, 1, 2]
    assert encoder.loads == 1


def nobody(number: int) -> None:
    """As `pwd` answers for a user id that it does not know."""
    raise KeyError(f"getpwuid(): uid not found: {number}")


def test_a_cache_of_a_user_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGG_CACHE", "~nobody-of-that-name/jagg")
    with pytest.raises(ValueError, match="JAGG_CACHE must be a folder, got '~nobody-of-that-name/jagg'"):
        cache_folder()


def test_a_cached_file_of_something_else_is_encoded_again(tmp_path: Path) -> None:
    encoder = Encoder()
    TextStore(["model"], encoder, (), tmp_path)(["aa"])
    [file] = (tmp_path / "text").iterdir()
    save_file({"other": torch.ones(1)}, file)
    assert len(TextStore(["model"], encoder, (), tmp_path)(["aa"])[0].tokens) == 2


@pytest.mark.parametrize("keep", [0, 10])
def test_a_damaged_file_is_encoded_again(tmp_path: Path, keep: int) -> None:
    encoder = Encoder()
    TextStore(["model"], encoder, (), tmp_path)(["aa"])
    [file] = (tmp_path / "text").iterdir()
    file.write_bytes(file.read_bytes()[:keep])
    assert len(TextStore(["model"], encoder, (), tmp_path)(["aa"])[0].tokens) == 2
    assert encoder.loads == 2


def test_a_prompt_without_a_pooled_part(tmp_path: Path) -> None:
    for _ in range(2):  # encoded, then read
        [text] = TextStore(["model"], lambda: lambda _: Text(torch.ones(2, 3)), (), tmp_path)(["aa"])
        assert text.pooled is None and text.tokens.shape == (2, 3)


def test_where_prompts_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAGG_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "jagg"
    monkeypatch.setenv("JAGG_CACHE", "")
    assert cache_folder() == tmp_path / "jagg"
    monkeypatch.setenv("JAGG_CACHE", "~/own")
    assert cache_folder() == Path.home() / "own"


def test_batches_are_padded_and_masked() -> None:
    batch = TextBatch.stack([Text(torch.ones(2, 3)), Text(torch.ones(1, 3))])
    assert batch.mask is not None and batch.pooled is None
    assert batch.tokens.tolist() == [[[1] * 3, [1] * 3], [[1] * 3, [0] * 3]]
    assert batch.mask.tolist() == [[True, True], [True, False]]
    assert batch.lengths() == [2, 1]
    picked = batch[torch.tensor([1, 1, 0])]
    assert picked.lengths() == [1, 1, 2]
    assert picked.tokens.shape == (3, 2, 3)


def test_texts_of_one_length_need_no_mask() -> None:
    batch = TextBatch.stack([Text(torch.ones(2, 3), torch.zeros(4)), Text(torch.ones(2, 3), torch.ones(4))])
    assert batch.mask is None and batch.lengths() == [2, 2]
    assert batch.pooled is not None and batch.pooled[:, 0].tolist() == [0, 1]


class Words:
    """A tokenizer of words."""

    def __call__(self, prompts: list[str], **settings: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(range(len(prompt.split()))) for prompt in prompts]}


def test_prompts_that_are_cut_are_counted_once(tmp_path: Path) -> None:
    encoder = text_module.PromptEncoder(Encoder()(), Words(), limit=3)
    store = TextStore(["model"], lambda: encoder, ["a b c", "a b c d", "one two three four five"], tmp_path)
    with pytest.warns(text_module.PromptCut, match="2 of 3 prompts have more than the 3 tokens .* the longest has 5"):
        store(["a b c"])
    store(["a b c d"])  # encoded with the first
