"""Text to token ids and back: Hugging Face folders, sentencepiece models, and the demo's vocabulary of words.

Loading never runs code from a checkpoint and never asks the network. Model types that transformers does not know
(llada, Dream, sdar) are no obstacle, because the tokenizer is built from its own files and not through the model's
configuration, of which only the mask token is read: LLaDA names it nowhere else.
"""

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megamem.errors import UserError
from megamem.tasks.base import shown

# Dream's tokenizer is Qwen2's under another name.
_QWEN2_CLASSES = {"Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer"}
_WORD_MARK = "\u2581"  # sentencepiece's sign for the space before a word


class Tokenizer(ABC):
    """Token ids of prompts and responses.

    Attributes:
        vocab_size: 1 + the highest id; a model's embedding may have more rows, which mean nothing.
        eos_id, pad_id, mask_id: None where the tokenizer has none. Often `pad_id == eos_id`, so that neither tells
            padding from an end.
        chat: whether `encode_prompt` applies a chat template.
    """

    vocab_size: int
    eos_id: int | None
    pad_id: int | None
    mask_id: int | None
    chat: bool

    @abstractmethod
    def encode_prompt(self, text: str) -> list[int]:
        """Ids after which a response begins. With `chat`, `text` is the user's turn and the header of the
        assistant's turn follows it; without, the same as `encode`."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: nothing is added before or after it."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids without special tokens (mask, pad and end included) and without ids beyond the vocabulary.

        Never raises on integers: a policy may sample padded rows of the embedding.
        """


def load_tokenizer(path: str | Path, chat: bool | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a Hugging Face folder with `tokenizer.json` (or with `vocab.json` and `merges.txt` of the Qwen2 kind);
            or a sentencepiece model, the file itself or a folder with `tokenizer.model`.
        chat: whether prompts get the chat template; None: where there is one.

    Raises:
        UserError: files missing or damaged, or `chat` without a template.
    """
    path = Path(path).expanduser()
    if path.is_file() and path.suffix == ".json":
        raise UserError(f"tokenizer: {str(path)!r}: give the folder of a Hugging Face tokenizer, not a file in it")
    if path.is_file():
        return SentencePieceTokenizer(path, chat)
    if not path.is_dir():
        raise UserError(f"tokenizer: {str(path)!r} does not exist (working directory: {Path.cwd()})")
    if not (path / "tokenizer.json").is_file() and (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(path / "tokenizer.model", chat)
    return HuggingFaceTokenizer(path, chat)


def _encodable(text: str) -> str:
    """The text with lone surrogates (which JSON can hold and UTF-8 cannot) replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object; empty where the file is absent."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"tokenizer: {str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"tokenizer: {str(path)!r} must hold a JSON object, got {shown(found)}")
    return found


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of transformers. Arguments and errors as `load_tokenizer`."""

    def __init__(self, folder: Path, chat: bool | None = None) -> None:
        self._folder = folder
        config = _read_json(folder / "config.json")
        self._tokenizer = _load_transformers(folder)
        tokens = self._tokenizer
        self.vocab_size = max(tokens.get_vocab().values(), default=-1) + 1
        if self.vocab_size == 0:
            raise UserError(f"tokenizer: {str(folder)!r} has an empty vocabulary")
        # The tokenizer goes first: the model's configuration of several chat models still names the base model's end.
        self.eos_id = _first_id(tokens.eos_token_id, config.get("eos_token_id"))
        self.pad_id = _first_id(tokens.pad_token_id, config.get("pad_token_id"), self.eos_id)
        self.mask_id = _first_id(tokens.mask_token_id, config.get("mask_token_id"))
        special = {index for index, token in tokens.added_tokens_decoder.items() if token.special}
        self._dropped = special | set(tokens.all_special_ids) | {self.eos_id, self.pad_id, self.mask_id}
        self.chat = bool(tokens.chat_template) if chat is None else chat
        if self.chat:
            if not tokens.chat_template:
                raise UserError(f"tokenizer: chat is true, but {str(folder)!r} has no chat template; set chat to false")
            self._render("hello")

    def _render(self, text: str) -> str:
        # LLaDA's template adds the assistant's header whether asked or not, others only when asked.
        turns = [{"role": "user", "content": text}]
        try:
            return self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the checkpoint's author
            raise UserError(f"tokenizer: the chat template of {str(self._folder)!r} fails: {error}") from error

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(self._render(text) if self.chat else text)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(_encodable(text), add_special_tokens=False)["input_ids"])

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(i) for i in ids]
        kept = [i for i in kept if 0 <= i < self.vocab_size and i not in self._dropped]
        return self._tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _first_id(*candidates: object) -> int | None:
    """The first candidate that is an id; the configuration of some models gives a list of ends, of which the first."""
    for candidate in candidates:
        if isinstance(candidate, list) and candidate:
            candidate = candidate[0]
        if isinstance(candidate, int) and not isinstance(candidate, bool) and candidate >= 0:
            return candidate
    return None


def _load_transformers(folder: Path) -> Any:
    settings = _read_json(folder / "tokenizer_config.json")
    qwen2 = settings.get("tokenizer_class") in _QWEN2_CLASSES
    if not (folder / "tokenizer.json").is_file():
        wanted = ["vocab.json", "merges.txt"] if qwen2 else ["tokenizer.json"]
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            also = "" if qwen2 else " (or tokenizer.model of sentencepiece)"
            raise UserError(f"tokenizer: {str(folder)!r} lacks {' and '.join(missing)}{also}")
    # Imported here: it takes seconds, and a sentencepiece model needs none of it.
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    # Not AutoTokenizer: it would ask for the checkpoint's own code. With tokenizer.json the file says everything.
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else Qwen2Tokenizer
    try:
        return kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the libraries below raise bare exceptions on damaged files
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"tokenizer: {str(folder)!r} cannot be loaded: {shown(reason)}") from error


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; it has no chat template. Arguments and errors as `load_tokenizer`.

    The end is the model's own or the piece `</s>`, padding its own, the piece `<pad>` or else the end, and the mask
    the piece `<mask>`.
    """

    chat = False

    def __init__(self, path: Path, chat: bool | None = None) -> None:
        if chat:
            raise UserError(f"tokenizer: chat is true, but the sentencepiece model {str(path)!r} has no chat template")
        try:
            content = path.read_bytes()
            if not content:
                raise RuntimeError("the file is empty")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size = self._model.get_piece_size()
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"tokenizer: {str(path)!r} is not a sentencepiece model: {error}") from error
        eos, pad = self._model.eos_id(), self._model.pad_id()
        self.eos_id = eos if eos >= 0 else self._piece("</s>")
        self.pad_id = pad if pad >= 0 else self._piece("<pad>")
        if self.pad_id is None:
            self.pad_id = self.eos_id
        self.mask_id = self._piece("<mask>")
        tests = (self._model.is_control, self._model.is_unknown, self._model.is_unused)
        self._dropped = {i for i in range(self.vocab_size) if any(test(i) for test in tests)}
        self._dropped |= {i for i in (self.eos_id, self.pad_id, self.mask_id) if i is not None}

    def _piece(self, piece: str) -> int | None:
        found = self._model.piece_to_id(piece)  # the id of the unknown piece where there is none
        return found if 0 <= found < self.vocab_size and self._model.id_to_piece(found) == piece else None

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return list(self._model.encode(_encodable(text), add_bos=False, add_eos=False))

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(i) for i in ids]
        return self._model.decode([i for i in kept if 0 <= i < self.vocab_size and i not in self._dropped])


def train_word_sentencepiece(words: Sequence[str], out: Path) -> None:
    """Write a sentencepiece model in which every given word is one piece, such as `megamem.tasks.sudoku4.vocabulary`.

    Ids: 0 unknown, 1 `</s>` (end), 2 `<mask>`, then the words in the order given, from 3. `encode(" ".join(words))`
    gives one id per word and nothing else; other words in a row are one unknown; `decode` joins words with spaces.
    87 ids for the 84 words of 4x4 Sudoku.

    Args:
        words: different, not empty, without white space.
        out: the file to write; its folder is made.

    Raises:
        UserError: a word that cannot be a piece of its own.
    """
    reserved = {"<unk>", "</s>", "<mask>", "<s>", "<pad>"}
    for index, word in enumerate(words):
        if not word or len(word.split()) != 1 or word != word.strip() or _WORD_MARK in word or word in reserved:
            raise UserError(f"words: {shown(word)} cannot be a word: one without white space or a reserved name")
        if word in words[:index]:
            raise UserError(f"words: {shown(word)} is given twice")
    if not words:
        raise UserError("words: at least one is needed")
    # Pieces are numbered by falling frequency, so each word appears once more often than the next.
    corpus = (word for index, word in enumerate(words) for _ in range(len(words) - index))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus,
        model_writer=model,
        model_type="word",
        vocab_size=len(words) + 3,
        unk_id=0,
        bos_id=-1,
        eos_id=1,
        pad_id=-1,
        control_symbols=["<mask>"],
        normalization_rule_name="identity",
        character_coverage=1.0,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert trained.encode(" ".join(words)) == list(range(3, 3 + len(words))), "one piece per word, in order"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(model.getvalue())
