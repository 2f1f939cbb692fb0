"""Conversion: maps are exact inverses, files come back bit-equal, a damaged folder is refused by name.

Shapes: V vocabulary rows, H hidden, F ffn, N query heads, G key/value heads, D head dim.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamem.config.architecture import Architecture
from megamem.convert.maps import GateUp, Plain, Qkv, Vocab
from megamem.convert.source import CODES, RandomSource, SafetensorsSource, check_coverage, read_hf_config
from megamem.convert.writer import SafetensorsWriter
from megamem.models.spec import find_spec
from tests.helpers import llada_config, qwen_config, refused, shared, write_config
from tests.tol import assert_exact

ARCH = Architecture(
    layers=2, hidden=24, ffn=20, heads=8, kv_heads=4, head_dim=6, vocab_rows=131, mask_id=130, eos_id=0, pad_id=0
)
MAPS = {
    "replicated": Plain("n", "n", (24,)),
    "rows": Plain("c", "c", (20, 24), axis=0),
    "columns": Plain("r", "r", (24, 20), axis=1),
    "qkv": Qkv("qkv", ("q", "k", "v")),
    "qkv_bias": Qkv("qkv", ("q", "k", "v"), bias=True),
    "gate_up": GateUp("fc1", ("gate", "up")),
    "vocab": Vocab("emb", "wte"),
}
each_size = pytest.mark.parametrize("size", [1, 2, 4])


def tensors_of(entry, arch: Architecture = ARCH) -> list[torch.Tensor]:
    key = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=key) for shape in entry.shapes(arch)]


@each_size
@pytest.mark.parametrize("entry", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize(
    "change", [{}, {"kv_heads": 8}, {"kv_heads": 1}, {"vocab_rows": 97}], ids=["gqa", "mha", "mqa", "97_rows"]
)
def test_join_inverts_split(entry, change, size):
    """One key/value head over 4 ranks too: megatron-core cuts through the group there."""
    arch = ARCH.model_copy(update=change)
    tensors = tensors_of(entry, arch)
    shards = [entry.split(tensors, arch, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1, "shards are equal in size"
    back = entry.join(shards, arch)
    assert len(back) == len(tensors) == len(entry.hf)
    for name, a, b in zip(entry.hf, back, tensors, strict=True):
        assert_exact(a, b, name)


@each_size
@pytest.mark.parametrize("bias", [False, True])
def test_qkv_shard_by_hand(size, bias):
    """Rank r holds the next G / size groups, each as its queries, its key, its value."""
    entry = Qkv("qkv", ("q", "k", "v"), bias)
    q, k, v = tensors_of(entry)
    dim, per_group, groups = 6, 2, 4
    for rank in range(size):
        rows = []
        for g in range(rank * groups // size, (rank + 1) * groups // size):
            rows += [q[(g * per_group + i) * dim :][:dim] for i in range(per_group)]
            rows += [k[g * dim :][:dim], v[g * dim :][:dim]]
        assert_exact(entry.split([q, k, v], ARCH, rank, size), torch.cat(rows))


@each_size
def test_gate_up_shard_by_hand(size):
    """Split first, then stacked: not a slice of the stacked matrix."""
    gate, up = tensors_of(MAPS["gate_up"])
    n = 20 // size
    for rank in range(size):
        expected = torch.cat([gate[rank * n : (rank + 1) * n], up[rank * n : (rank + 1) * n]])
        assert_exact(MAPS["gate_up"].split([gate, up], ARCH, rank, size), expected)


@each_size
def test_vocab_shards_by_hand(size):
    """256 rows, the 125 beyond the file are zero; with 4 ranks the last holds nothing else."""
    (wte,) = tensors_of(MAPS["vocab"])
    padded = torch.cat([wte, torch.zeros(125, 24)])
    for rank in range(size):
        n = 256 // size
        assert_exact(MAPS["vocab"].split([wte], ARCH, rank, size), padded[rank * n : (rank + 1) * n])


# --- files

DTYPES = list(CODES)


def sample_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-6, 3.0]).to(dtype)
    key = torch.Generator().manual_seed(1)
    return {
        "special": special,
        "odd": torch.randn(3, 7, generator=key).to(dtype),
        "view": torch.randn(5, 4, generator=key).to(dtype).t(),
        "one": torch.randn(1, generator=key).to(dtype),
        "scalar": torch.tensor(2.5).to(dtype),
        "three.axes": torch.randn(2, 3, 5, generator=key).to(dtype),
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], **options) -> None:
    with SafetensorsWriter(folder, [(n, tuple(t.shape), t.dtype) for n, t in tensors.items()], **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("file_bytes", [10**9, 60, 1], ids=["one_file", "some_files", "file_per_tensor"])
def test_files_round_trip(tmp_path, dtype, file_bytes):
    tensors = sample_tensors(dtype)
    write(tmp_path, tensors, file_bytes=file_bytes)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    if file_bytes == 10**9:
        assert files == ["model.safetensors"] and not index.exists()
    else:
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert len(files) == len(tensors) or file_bytes > 1
        told = json.loads(index.read_text())
        assert told["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in tensors.values())
        assert set(told["weight_map"]) == set(tensors) and set(told["weight_map"].values()) == set(files)
    source, library = SafetensorsSource(tmp_path), {}
    for file in files:
        library |= load_file(tmp_path / file)
    assert set(source.shapes) == set(library) == set(tensors)
    for name, tensor in tensors.items():
        assert (source.shapes[name], source.dtypes[name]) == (tuple(tensor.shape), dtype)
        assert_exact(source.read(name), tensor, name)
        assert_exact(library[name], tensor, f"{name} by the library")


def test_the_library_writes_what_we_read(tmp_path):
    tensors = {f"{name}.{dtype}": t.contiguous() for dtype in DTYPES for name, t in sample_tensors(dtype).items()}
    save_file(tensors, tmp_path / "weights.safetensors")
    source = SafetensorsSource(tmp_path)
    for name, tensor in tensors.items():
        assert_exact(source.read(name), tensor, name)


def test_writer_casts_to_the_announced_dtype(tmp_path):
    with SafetensorsWriter(tmp_path, [("x", (2,), torch.bfloat16)]) as writer:
        writer.write("x", torch.tensor([1.001, 2.0]))
    assert_exact(SafetensorsSource(tmp_path).read("x"), torch.tensor([1.001, 2.0]).bfloat16())


@pytest.mark.parametrize("calls", [["b"], ["a"], ["a", "wrong_shape"]], ids=["order", "unfinished", "shape"])
def test_writer_holds_to_its_announcement(tmp_path, calls):
    values = {"a": torch.zeros(2), "b": torch.zeros(3), "wrong_shape": torch.zeros(4)}
    with pytest.raises(AssertionError):
        with SafetensorsWriter(tmp_path, [("a", (2,), torch.float32), ("b", (3,), torch.float32)]) as writer:
            for name in calls:
                writer.write("b" if name == "wrong_shape" else name, values[name])


# --- damaged folders


@pytest.fixture
def folder(tmp_path) -> Path:
    """A good tiny LLaDA in several files."""
    config = llada_config()
    write_config(tmp_path, config)
    spec = find_spec(config, "here")
    arch = spec.read_config(config)
    source = RandomSource(spec.tensor_maps(arch), arch, seed=0)
    write(tmp_path, {name: source.read(name) for name in source.shapes}, file_bytes=9000)
    return tmp_path


def open_folder(folder: Path) -> None:
    """What every command does first with a Hugging Face folder."""
    config = read_hf_config(folder)
    spec = find_spec(config, str(folder / "config.json"))
    arch = spec.read_config(config)
    check_coverage(spec.tensor_maps(arch), arch, SafetensorsSource(folder))


def some_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def change_config(folder: Path, **changes) -> None:
    config = llada_config(**changes)
    write_config(folder, {k: v for k, v in config.items() if v != "absent"})


def test_good_folder(folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    open_folder(folder)


def test_truncated_file(folder):
    path = some_file(folder)
    path.write_bytes(path.read_bytes()[:-5])
    message = refused(open_folder, folder)
    assert str(path) in message and "not a whole safetensors file" in message


@pytest.mark.parametrize(
    "content", [b"", b"not safetensors at all", b"\xff" * 64], ids=["empty", "text", "huge_header"]
)
def test_garbage_file(folder, content):
    path = some_file(folder)
    path.write_bytes(content)
    message = refused(open_folder, folder)
    assert str(path) in message and "not a whole safetensors file" in message


def test_missing_shard(folder):
    path = some_file(folder)
    path.unlink()
    message = refused(open_folder, folder)
    assert str(folder) in message and path.name in message and "1 of" in message


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", '{"weight_map": 3}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', "{}"],
)
def test_broken_index(folder, text):
    path = folder / "model.safetensors.index.json"
    path.write_text(text)
    message = refused(open_folder, folder)
    assert str(path) in message and "not a safetensors index" in message


def test_index_of_other_files(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = list(index["weight_map"])
    index["weight_map"][names[0]] = index["weight_map"][names[-1]]
    path.write_text(json.dumps(index))
    assert "are not those that model.safetensors.index.json lists" in refused(open_folder, folder)


def test_no_weights(folder):
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    assert f"{folder}: no *.safetensors file" in refused(open_folder, folder)


def test_unknown_dtype(tmp_path):
    save_file({"x": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    message = refused(SafetensorsSource, tmp_path)
    assert "x has dtype I64" in message and "F64, F32, BF16, F16" in message


def rewrite(folder: Path, change) -> None:
    """All tensors in one file, after `change(tensors)`."""
    source = SafetensorsSource(folder)
    tensors = {name: source.read(name).clone() for name in source.shapes}
    change(tensors)
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


NORM = "model.transformer.blocks.1.ff_norm.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop(NORM), f"1 missing: {NORM}"),
        (lambda t: t.update(extra=torch.zeros(2)), "1 unexpected: extra"),
        (lambda t: t.update({NORM: torch.zeros(25)}), f"1 wrong shape: {NORM} [25] should be [24]"),
        (lambda t: t.update({str(i): torch.zeros(1) for i in range(5)}), "5 unexpected: 0, 1, 2 …"),
    ],
    ids=["missing", "unexpected", "shape", "many"],
)
def test_other_tensors(folder, change, told):
    rewrite(folder, change)
    message = refused(open_folder, folder)
    assert str(folder) in message and told in message, message


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert refused(open_folder, folder).startswith(f"{folder / 'config.json'}: no such file")
    assert "no such file" in refused(open_folder, folder / "nowhere")


@pytest.mark.parametrize("text", ['{"d_model": 3,}', "[1]", "", "\udcff"], ids=["comma", "list", "empty", "not_utf8"])
def test_broken_config(folder, text):
    (folder / "config.json").write_text(text, errors="surrogateescape")
    assert refused(open_folder, folder).startswith(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, ["model_type = 'gpt2'", "supported: Dream, ", " llada, qwen2, qwen3, sdar"]),
        ({"model_type": "absent"}, ["model_type = None", "llada"]),
        ({"activation_type": "gelu"}, ["activation_type = 'gelu'", "allowed: 'silu'"]),
        ({"alibi": True}, ["alibi = True", "allowed: False"]),
        ({"include_qkv_bias": True}, ["include_qkv_bias = True", "allowed: False"]),
        ({"n_layers": "absent"}, ["'n_layers' is missing"]),
        ({"mask_token_id": "absent"}, ["'mask_token_id' is missing"]),
        ({"n_heads": 5}, ["d_model = 24", "n_heads = 5"]),
        ({"n_heads": 0}, ["n_heads = 0", "positive integer"]),
        ({"mlp_hidden_size": "wide"}, ["ffn = 'wide'"]),
        ({"n_layers": "two"}, ["n_layers = 'two'", "positive integer"]),
        ({"d_model": None}, ["d_model = None", "positive integer"]),
        ({"vocab_size": -1, "embedding_size": None}, ["vocab_size = -1", "positive integer"]),
        ({"n_kv_heads": 3}, ["n_kv_heads = 3", "n_heads = 4"]),
        ({"n_heads": 8, "n_kv_heads": 8}, ["d_model = 24", "n_heads = 8", "even"]),  # RoPE has no halves of 3
        ({"mask_token_id": 97}, ["mask_token_id = 97", "0 … 96"]),
        ({"eos_token_id": None}, ["eos_token_id = None", "0 … 96"]),
        ({"rope_theta": "big"}, ["rope_theta = 'big'"]),
    ],
    ids=str,
)
def test_wrong_config(folder, changes, told):
    change_config(folder, **changes)
    message = refused(open_folder, folder)
    assert "config.json" in message and all(text in message for text in told), message


def qwen_arch(model_type: str, **changes) -> Architecture:
    config = {k: v for k, v in qwen_config(model_type, **changes).items() if v != "absent"}
    return find_spec(config, "here").read_config(config)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "a2d-qwen3", "sdar", "Dream"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "allowed: 'silu'"]),
        ({"attention_dropout": 0.1}, ["attention_dropout = 0.1", "allowed: 0.0"]),
        ({"attention_bias": True}, ["attention_bias = True", "allowed: null or false"]),
        ({"use_sliding_window": True}, ["use_sliding_window = True", "allowed: null or false"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "'sliding_attention'"]),
        ({"num_experts": 8}, ["num_experts = 8", "null"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type = 'yarn'", "'default'"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters.rope_type = 'linear'", "'default'"]),
        ({"rope_scaling": 4.0}, ["rope_scaling = 4.0", "object or null"]),
        ({"rope_theta": None}, ["rope_theta = None"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "num_attention_heads = 4"]),
        ({"num_key_value_heads": "absent"}, ["'num_key_value_heads' is missing"]),
        ({"head_dim": 5}, ["head_dim = 5", "even"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers = 'two'", "positive integer"]),
        ({"eos_token_id": 97}, ["eos_token_id = 97", "0 … 96"]),
        ({"tie_word_embeddings": "maybe"}, ["tied_head = 'maybe'"]),
    ],
    ids=str,
)
def test_wrong_qwen_config(model_type, changes, told):
    message = refused(qwen_arch, model_type, **changes)
    assert "config.json" in message and all(text in message for text in told), message


def test_qwen_defaults():
    """What an absent key means is the published code's default, not ours."""
    assert (qwen_arch("qwen3", head_dim="absent").head_dim, qwen_arch("qwen2", head_dim="absent").head_dim) == (128, 6)
    assert "hidden_size = 26" in refused(qwen_arch, "qwen2", head_dim="absent", hidden_size=26)
    new = {"rope_theta": 5e5, "rope_type": "default"}  # as transformers 5 writes it
    assert qwen_arch("qwen3", rope_theta="absent", rope_parameters=new).rope_theta == 5e5
    assert qwen_arch("qwen3", rope_theta="absent").rope_theta == 10000.0
    assert "'block_size' is missing" in refused(qwen_arch, "sdar", block_size="absent")


def test_what_each_model_type_is():
    def facts(arch: Architecture):
        return arch.sequence_attention, arch.shifted_logits, arch.qkv_bias, arch.qk_norm, arch.mask_id

    assert facts(qwen_arch("qwen2", mask_token_id=5)) == ("causal", True, True, False, None)
    assert facts(qwen_arch("qwen3")) == ("causal", True, False, True, None)
    assert facts(qwen_arch("a2d-qwen2", mask_token_id=5)) == ("full", False, True, False, 5)
    assert facts(qwen_arch("a2d-qwen3")) == ("full", False, False, True, None)
    assert facts(qwen_arch("sdar")) == ("block:4", False, False, True, 96)
    assert facts(qwen_arch("Dream")) == ("full", True, True, False, 96)


# --- token ids


def test_token_ids_come_from_where_generation_reads_them(tmp_path):
    """generation_config.json, then config.json, then the tokenizer; a list of ends starts with the one that is written.

    `null` says nothing (Dream's generation_config.json has a null mask).
    """

    def ids(config: dict, generation: dict | None = None, tokenizer: dict | None = None) -> list:
        files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer}
        for name, content in files.items():
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        found = read_hf_config(tmp_path)
        return [found.get(f"{name}_token_id") for name in ("mask", "eos", "pad")]

    assert ids({}) == [None] * 3
    config = {"mask_token_id": 3, "eos_token_id": 1, "pad_token_id": None}
    assert ids(config) == [3, 1, None]
    assert ids(config, {"mask_token_id": None, "eos_token_id": [2, 1]}) == [3, 2, None]
    added = {"4": {"content": "<|mask|>"}, "5": {"content": "<|end|>"}, "0": {"content": "<|pad|>"}}
    tokenizer = {"added_tokens_decoder": added, "mask_token": "<|mask|>", "pad_token": {"content": "<|pad|>"}}
    assert ids(config, {}, tokenizer | {"eos_token": "<|end|>"}) == [3, 1, 0]
    assert ids({}, {}, tokenizer | {"eos_token": None}) == [4, None, 0]
    assert ids({}, None, {"mask_token": "<|mask|>"}) == [None] * 3
    (tmp_path / "generation_config.json").write_text("[]")
    assert "generation_config.json: must hold a JSON object" in refused(read_hf_config, tmp_path)


# --- real models

# hidden, layers, heads, kv_heads, head_dim, ffn, vocabulary rows, mask, eos
REAL = {
    "llada-8b-instruct": (4096, 32, 32, 32, 128, 12288, 126464, 126336, 126081),
    "dream-7b-instruct": (3584, 28, 28, 4, 128, 18944, 152064, 151666, 151643),
    "sdar-1.7b-chat": (2048, 28, 16, 8, 128, 6144, 151936, 151669, 151643),
    "sdar-8b-chat": (4096, 36, 32, 8, 128, 12288, 151936, 151669, 151643),
}


@pytest.mark.parametrize("name", REAL)
def test_maps_cover_real_models(name):
    """Names and total bytes of the published index, from the published configuration alone."""
    folder = shared("data", "models", name)
    config = read_hf_config(folder)
    spec = find_spec(config, str(folder))
    arch = spec.read_config(config)
    sizes = (arch.hidden, arch.layers, arch.heads, arch.kv_heads, arch.head_dim, arch.ffn, arch.vocab_rows)
    assert (*sizes, arch.mask_id, arch.eos_id) == REAL[name]
    shapes = [(n, s) for m in spec.tensor_maps(arch) for n, s in zip(m.hf, m.shapes(arch), strict=True)]
    bf16 = sum(2 * math.prod(shape) for _, shape in shapes)
    if name == "sdar-1.7b-chat":  # one file, so no index: the published number of parameters
        assert bf16 == 2 * 2_031_739_904
        return
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(name for name, _ in shapes) == sorted(index["weight_map"]), "every tensor once"
    assert bf16 == index["metadata"]["total_size"]


# --- random weights


def random_source(seed: int = 0, **changes) -> tuple[RandomSource, list, Architecture]:
    config = llada_config(**changes)
    spec = find_spec(config, "here")
    arch = spec.read_config(config)
    maps = spec.tensor_maps(arch)
    return RandomSource(maps, arch, seed), maps, arch


@each_size
def test_random_weights_do_not_depend_on_the_layout(size):
    """Shards of any tensor-parallel size join to one model; a pipeline stage that asks for few names gets the same."""
    source, maps, arch = random_source(mlp_hidden_size=20)
    again, *_ = random_source(mlp_hidden_size=20)
    for entry in reversed(maps):
        tensors = [source.read(name) for name in entry.hf]
        joined = entry.join([entry.split(tensors, arch, rank, size) for rank in range(size)], arch)
        for name, tensor in zip(entry.hf, joined, strict=True):
            assert_exact(tensor, again.read(name), name)


def test_random_weights():
    source, _, arch = random_source(d_model=96, mlp_hidden_size=160, n_layers=3)
    narrow = arch.init_std / math.sqrt(6)
    for name in source.shapes:
        x = source.read(name)
        if x.dim() == 1:
            assert_exact(x, torch.ones(96), name)
            continue
        std = narrow if "attn_out" in name or "blocks" in name and "ff_out" in name else arch.init_std
        assert x.std().item() == pytest.approx(std, rel=0.05), name  # a std of > 4,000 numbers is known to 1.1 %
    names = [n for n in source.shapes if len(source.shapes[n]) == 2]
    assert not torch.equal(source.read(names[1]), source.read(names[1].replace("blocks.0", "blocks.1")))
    other, *_ = random_source(1, d_model=96, mlp_hidden_size=160, n_layers=3)
    assert not torch.equal(source.read(names[0]), other.read(names[0]))
    check_coverage(*random_source(1)[1:], random_source()[0])
