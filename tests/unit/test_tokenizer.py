"""Tokenizers: Hugging Face folders (made here, and real ones), sentencepiece models, the demo's words."""

import io
import json
import socket
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megamem.errors import UserError
from megamem.tasks import sudoku4
from megamem.tasks.registry import load_task
from megamem.tasks.tokenizer import Tokenizer, load_tokenizer, train_word_sentencepiece

MODELS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models"

# As LLaDA's: the assistant's header comes whether it is asked for or not.
ALWAYS_HEADER = (
    "{{ bos_token }}{% for m in messages %}"
    "<|head|>{{ m['role'] }}<|/head|>{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "<|head|>assistant<|/head|>"
)
HEADER_WHEN_ASKED = ALWAYS_HEADER.replace(
    "{% endfor %}<|head|>assistant<|/head|>",
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>{% endif %}",
)
SPECIAL = ["<|bos|>", "<|endoftext|>", "<|head|>", "<|/head|>", "<|eot_id|>", "<|mdm_mask|>"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tokenizer asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def make_folder(folder: Path, template: str | None = ALWAYS_HEADER, config: object = None) -> Path:
    """A byte-level tokenizer that adds a beginning token by itself, as several checkpoints do."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    settings |= {"pad_token": "<|endoftext|>", "trust_remote_code": True}
    settings |= {"auto_map": {"AutoTokenizer": ["no.Such", None]}}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config is None:
        config = {"model_type": "llada", "mask_token_id": 261, "vocab_size": 320, "auto_map": {"AutoModel": "no.Such"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("words") / "deep" / "tokenizer.model"
    train_word_sentencepiece(sudoku4.vocabulary("cells"), path)
    return load_tokenizer(path)


@pytest.mark.parametrize("template", [ALWAYS_HEADER, HEADER_WHEN_ASKED])
def test_hugging_face_chat(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path / "t", template))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (262, 257, 257, 261)
    assert tokenizer.chat
    ids = tokenizer.encode_prompt(" 1+1? ")
    assert ids.count(256) == 1 and ids[0] == 256, "one beginning token"
    assert ids.count(258) == 2 and ids[-1] == 259, "the user's header and, once and last, the assistant's"
    assert tokenizer.decode(ids) == "user1+1?assistant"


def test_hugging_face_without_chat(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "t")
    plain = load_tokenizer(folder, chat=False)
    assert plain.encode_prompt("1 2") == plain.encode("1 2") and len(plain.encode("1 2")) == 3
    assert plain.encode("") == []
    base = load_tokenizer(make_folder(tmp_path / "base", template=None))
    assert not base.chat and base.encode_prompt("1 2") == plain.encode("1 2")
    with pytest.raises(UserError, match="chat is true, but .* has no chat template"):
        load_tokenizer(tmp_path / "base", chat=True)


def test_hugging_face_template_in_a_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "t", template=None)
    (folder / "chat_template.jinja").write_text(HEADER_WHEN_ASKED)
    assert load_tokenizer(folder).chat


@pytest.mark.parametrize(
    "text", ["", "a  b\n\n c ", "3 * 4 , ok ? it 's", "Grüße \U0001f600 \x00", "<answer>\n1\n</answer>"]
)
def test_hugging_face_round_trip(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path / "t"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_hugging_face_decodes_any_id(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path / "t"))
    noise = [-1, 262, 319, 10**30, *range(256, 262)]
    assert tokenizer.decode(noise) == ""
    assert tokenizer.decode([*noise, *tokenizer.encode("ok"), *noise]) == "ok"
    assert tokenizer.decode(np.array(tokenizer.encode("ok"))) == "ok"
    assert isinstance(tokenizer.decode(range(300)), str)
    assert "?" in tokenizer.decode(tokenizer.encode("\ud800"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", "{", "cannot be loaded"),
        ("tokenizer.json", "", "cannot be loaded"),
        ("tokenizer.json", "{}", "cannot be loaded"),
        ("tokenizer_config.json", "{", "tokenizer_config.json' cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("config.json", "\x00", "config.json' cannot be read as JSON"),
        ("chat_template.jinja", "{% if", "the chat template of .* fails"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "the chat template of .* fails: no"),
    ],
)
def test_hugging_face_damaged(tmp_path: Path, name: str, content: str, expected: str) -> None:
    folder = make_folder(tmp_path / "t")
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=expected):
        load_tokenizer(folder)


@pytest.mark.parametrize("config", [{}, {"mask_token_id": None}, {"mask_token_id": "x"}, {"mask_token_id": True}])
def test_mask_unknown(tmp_path: Path, config: dict) -> None:
    assert load_tokenizer(make_folder(tmp_path / "t", config=config)).mask_id is None


@pytest.mark.parametrize("name", ["llada-8b-instruct", "llada2.0-mini", "sdar-1.7b-chat"])
def test_real_folder_without_tokenizer_json(name: str) -> None:
    """As they lie beside the repository these lack the vocabulary; with it, LLaDA's folder is tested like the rest."""
    folder = MODELS / name
    if not folder.is_dir():
        pytest.skip(f"no {name} beside the repository")
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
        assert tokenizer.chat and tokenizer.decode(tokenizer.encode("1 + 1 = 2")) == "1 + 1 = 2"
        return
    with pytest.raises(UserError, match=f"{name}' lacks tokenizer.json"):
        load_tokenizer(folder)


def test_template_of_llada_8b(tmp_path: Path) -> None:
    """LLaDA-8B-Instruct's own template and special tokens on a small vocabulary: one header, no second beginning."""
    source = MODELS / "llada-8b-instruct" / "tokenizer_config.json"
    if not source.is_file():
        pytest.skip("no llada-8b-instruct beside the repository")
    template = json.loads(source.read_text())["chat_template"]
    tokenizer = load_tokenizer(make_folder(tmp_path / "t", template))
    assert tokenizer.encode_prompt("hi").count(256) == 1
    expected = "<|start_header_id|>user<|end_header_id|>\n\nhi<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert tokenizer.decode(tokenizer.encode_prompt(" hi ")) == expected


def test_real_dream() -> None:
    """Dream has vocab.json and merges.txt, and code of its own that is not run."""
    if not (MODELS / "dream-7b-instruct" / "vocab.json").is_file():
        pytest.skip("no dream-7b-instruct beside the repository")
    tokenizer = load_tokenizer(MODELS / "dream-7b-instruct")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (151667, 151643, 151643)
    assert tokenizer.mask_id == 151666 and tokenizer.chat
    ids = tokenizer.encode_prompt("1+1?")
    header = tokenizer.encode("<|im_start|>assistant\n")
    assert header[0] == 151644 and ids[-len(header) :] == header and ids.count(151644) == 3
    text = "<answer>\n(12 + 3) * 4\n</answer>"
    assert tokenizer.decode([*tokenizer.encode(text), 151643, 151666, 151999, 152063]) == text


def test_no_such_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match="lacks tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "DreamTokenizer"}')
    with pytest.raises(UserError, match="lacks vocab.json and merges.txt"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="give the folder"):
        load_tokenizer(tmp_path / "tokenizer_config.json")


def test_words(words: Tokenizer) -> None:
    vocabulary = sudoku4.vocabulary("cells")
    assert words.vocab_size == 87
    assert (words.eos_id, words.pad_id, words.mask_id, words.chat) == (1, 1, 2, False)
    assert words.encode(" ".join(vocabulary)) == list(range(3, 87))
    assert words.decode(range(87)) == " ".join(vocabulary)
    for index, word in enumerate(vocabulary):
        assert words.encode(word) == [3 + index] and words.decode([3 + index]) == word
    assert words.encode("") == [] and words.decode([]) == ""
    assert words.encode("zz </s> <mask> a1:0 zz") == [0, 3, 0], "special tokens cannot be written"
    assert words.decode([-1, 0, 1, 2, 87, 10**30, 3]) == "a1:0"
    assert words.encode("\ud800") == [0]


def test_words_have_no_template(tmp_path: Path) -> None:
    train_word_sentencepiece(["x"], tmp_path / "tokenizer.model")
    assert not load_tokenizer(tmp_path, chat=False).chat
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(tmp_path, chat=True)


def test_words_serve_the_demo(words: Tokenizer) -> None:
    task = load_task("sudoku4", {"style": "cells", "train_size": 5, "valid_size": 5, "test_size": 5})
    for problem in task.problems("test"):
        prompt, response = words.encode_prompt(problem.prompt), words.encode(task.answer(problem))
        assert len(prompt) == len(response) == 16 and 0 not in prompt + response
        assert task.score(problem, words.decode([*response, words.eos_id])).exact
        assert not task.score(problem, words.decode([words.mask_id] * 16)).exact


def test_words_are_deterministic(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_word_sentencepiece(["x", "y"], tmp_path / name / "tokenizer.model")
    assert (tmp_path / "a" / "tokenizer.model").read_bytes() == (tmp_path / "b" / "tokenizer.model").read_bytes()
    assert load_tokenizer(tmp_path / "a").encode("y x") == [4, 3]
    train_word_sentencepiece(["only"], tmp_path / "one.model")
    assert load_tokenizer(tmp_path / "one.model").encode("only only") == [3, 3]


@pytest.mark.parametrize("bad", [[], [""], ["a", "a"], ["a b"], ["a\n"], ["</s>"], ["\u2581a"]])
def test_words_that_cannot_be(tmp_path: Path, bad: list[str]) -> None:
    with pytest.raises(UserError, match="words: "):
        train_word_sentencepiece(bad, tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


def test_ordinary_sentencepiece(tmp_path: Path) -> None:
    """A model of another make: own end, no mask, byte fallback."""
    model = io.BytesIO()
    corpus = ["the cat sat on the mat", "a cat and a dog", "numbers 1 2 3 4"] * 10
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, pad_id=3, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (2, 3, None)
    assert tokenizer.decode(tokenizer.encode("the cat é sat")) == "the cat é sat"
    assert all(isinstance(tokenizer.decode([i]), str) for i in range(-2, tokenizer.vocab_size + 2))


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100, b"\xff\xfe" * 50])
def test_damaged_sentencepiece(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(UserError, match="tokenizer.model' is not a sentencepiece model"):
            load_tokenizer(path)
