"""Models in a bucket, against servers of the S3 protocol."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpuagent.agent.model_store import bucket as buckets
from gpuagent.agent.model_store.bucket import Bucket, fetch_files, identity
from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.fetch import Limits
from gpuagent.agent.model_store.manifest import folder_sha256, hash_files
from gpuagent.agent.model_store.sources import S3Source, parse_source
from gpuagent.agent.model_store.store import LocalModel, ModelStore
from tests.agent.one_worker import one_generation
from tests.engine.tiny_model import tiny_model
from tests.model_store.s3_server import KEY, SECRET, Line, Server, aws_names, environment, liar

SOURCE = "s3://models/chat/v2"
MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "1_Pooling/config.json": b"{} "}
MIB = 1 << 20
LARGE = {**MODEL, "model.safetensors": os.urandom(18 * MIB)}
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """An empty server that the environment names, with a key in it."""
    running.reset()
    reach(monkeypatch, running.url)
    return running


def reach(monkeypatch: pytest.MonkeyPatch, url: str, key: str = KEY) -> None:
    for name in aws_names():
        monkeypatch.delenv(name)
    for name, value in environment(url, key).items():
        monkeypatch.setenv(name, value)


def refusal(root: Path, source: str = SOURCE, limits: Limits | None = None) -> ModelStoreError:
    with pytest.raises(ModelStoreError) as refused:
        ModelStore(root, limits=limits).ensure(source)
    assert "\n" not in refused.value.message and refused.value.message.endswith(".")
    return refused.value


def files_of(model: LocalModel) -> dict[str, bytes]:
    found = (path for path in model.path.rglob("*") if path.is_file())
    return {path.relative_to(model.path).as_posix(): path.read_bytes() for path in found}


def parts(root: Path) -> list[Path]:
    return list((root / ".staging").rglob("*.part"))


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("s3://models", S3Source("models", "")),
        ("s3://models/", S3Source("models", "")),
        ("s3://my.models/a/b-1/..c/", S3Source("my.models", "a/b-1/..c")),
    ],
)
def test_a_bucket_and_a_prefix_are_parsed(text: str, source: S3Source) -> None:
    assert parse_source(text) == source
    assert parse_source(source.text) == source


async def test_a_model_answers_as_it_does_from_a_folder(server: Server, tmp_path: Path) -> None:
    server.put("tiny", {path.name: path.read_bytes() for path in tiny_model().iterdir()})
    from_bucket = await one_generation("s3://models/tiny", str(tmp_path), 8)
    from_folder = await one_generation(f"file://{tiny_model()}", str(tmp_path), 8)
    assert [one.token_ids for one in from_bucket] == [one.token_ids for one in from_folder]
    assert from_bucket[-1].finish_reason in ("stop", "length")


def test_only_a_models_files_are_fetched_and_progress_is_told(
    server: Server, tmp_path: Path
) -> None:
    server.put("chat/v2", {**MODEL, "pytorch_model.bin": b"pickle", "modeling_evil.py": b"boom"})
    server.put("chat/v20", {"config.json": b"of another"})
    told: list[tuple[str, float]] = []
    model = ModelStore(tmp_path).ensure(SOURCE, progress=lambda *one: told.append(one))
    assert files_of(model) == MODEL
    assert told[0] == ("download", 0.0) and told[-2:] == [("download", 1.0), ("verify", 0.0)]
    assert told[:-1] == sorted(told[:-1])
    told.clear()
    assert (
        ModelStore(tmp_path).ensure(f"{SOURCE}/", progress=lambda *one: told.append(one)) == model
    )
    assert told == [("verify", 0.0)]


def test_a_whole_bucket_is_a_source_too(server: Server, tmp_path: Path) -> None:
    server.put("1_Pooling", {"config.json": b"{} "})
    server.put("", {name: MODEL[name] for name in ("config.json", "model.safetensors")})
    assert files_of(ModelStore(tmp_path).ensure("s3://models")) == MODEL


# --- what cannot be fetched ------------------------------------------------------------------


def test_there_is_no_such_prefix_or_bucket(server: Server, tmp_path: Path) -> None:
    found = refusal(tmp_path)
    assert (found.code, found.message) == ("source_missing", f"There is nothing under {SOURCE}.")
    found = refusal(tmp_path, "s3://absent/x")
    assert (found.code, found.message) == ("source_missing", "There is no bucket of s3://absent/x.")


def test_who_may_not_read_is_told_so_and_no_secret_is(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("chat/v2", MODEL)
    with capture_logs() as logged:
        server.is_open_to_all(False)
        denied = refusal(tmp_path)
        server.is_open_to_all(True)
        reach(monkeypatch, server.url, key="")
        unsigned = refusal(tmp_path)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        half = refusal(tmp_path)
    codes = [denied.code, unsigned.code, half.code]
    assert codes == ["access_denied", "credentials_missing", "access_denied"]
    said = f"{denied} {unsigned} {half} {logged}"
    assert "InvalidAccessKeyId" in said and said.count("403") == 2
    assert KEY not in said and SECRET not in said and "ignature" not in said


def test_what_is_public_needs_no_credentials(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("chat/v2", MODEL, is_public=True)
    reach(monkeypatch, server.url, key="")
    assert files_of(ModelStore(tmp_path).ensure(SOURCE)) == MODEL


def test_no_server_is_a_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may pass, other than what a server refuses."""
    reach(monkeypatch, DEAD)
    found = refusal(tmp_path)
    assert found.code == "download_failed"
    assert found.message == f"The server of {SOURCE} did not answer."


@pytest.mark.parametrize(
    ("objects", "limits", "code"),
    [
        ({"../../evil.json": 3}, Limits(), "archive_rejected"),
        ({"a/../../evil.json": 3}, Limits(), "archive_rejected"),
        ({"/etc/evil.json": 3}, Limits(), "archive_rejected"),
        ({"a\\..\\evil.json": 3}, Limits(), "archive_rejected"),
        ({"a\x85.json": 3}, Limits(), "archive_rejected"),
        ({f"{i}.json": 3 for i in range(10_000)}, Limits(), "too_large"),
        ({"b.safetensors": 1 << 60}, Limits(), "too_large"),
        ({"b.safetensors": 1 << 60}, Limits(1 << 62, 1 << 62), "insufficient_disk"),
        ({"b.safetensors": 4}, Limits(), "download_failed"),
        ({"b.safetensors": 2}, Limits(), "download_failed"),
        ({f"{'n' * 256}.json": 3}, Limits(), "download_failed"),
        ({"a.safetensors/b.json": 3, "c": 3}, Limits(), "download_failed"),
    ],
)
def test_a_server_that_lies_gets_nothing_onto_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    objects: dict[str, int],
    limits: Limits,
    code: str,
) -> None:
    listed = {f"chat/v2/{name}": size for name, size in {"a.safetensors": 3, **objects}.items()}
    with liar(listed) as url:
        reach(monkeypatch, url)
        assert refusal(tmp_path / "cache", limits=limits).code == code
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert not list((tmp_path / "cache").glob("s3-*"))


def test_without_weights_it_is_no_model(server: Server, tmp_path: Path) -> None:
    server.put("chat/v2", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ModelStoreError) as refused:
        ModelStore(tmp_path).ensure(SOURCE)
    assert refused.value.code == "format_not_allowed"


# --- what is cut off, and gone on with -------------------------------------------------------


def cut_off(root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A download that lost its server after 10 MiB; the file that it left behind."""
    server.put("chat/v2", LARGE)
    line = Line(server.address, limit=10 * MIB)
    reach(monkeypatch, line.url)
    assert refusal(root).code == "download_failed"
    line.close()
    (part,) = parts(root)
    assert 0 < part.stat().st_size < 18 * MIB
    return part


def test_a_download_goes_on_from_where_it_was_cut_off(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = cut_off(tmp_path, server, monkeypatch).stat().st_size
    line, told = Line(server.address), []
    reach(monkeypatch, line.url)
    model = ModelStore(tmp_path).ensure(SOURCE, progress=lambda _, part: told.append(part))
    line.close()
    assert files_of(model) == LARGE
    assert line.num_bytes < 18 * MIB - held + MIB
    assert told[0] > 0 and not parts(tmp_path)


def test_what_was_torn_on_disk_is_fetched_anew(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = cut_off(tmp_path, server, monkeypatch)
    with part.open("r+b") as file:
        file.write(b"\0" * 4096)
    reach(monkeypatch, server.url)
    assert files_of(ModelStore(tmp_path).ensure(SOURCE)) == LARGE


class Unwanted(Exception):
    """What a progress callback ends a load with."""


def test_a_load_that_nobody_wants_any_more_ends_and_may_be_gone_on_with(
    server: Server, tmp_path: Path
) -> None:
    def enough(stage: str, fraction: float) -> None:
        if fraction > 0.3:
            raise Unwanted

    server.put("chat/v2", LARGE)
    with pytest.raises(Unwanted):
        ModelStore(tmp_path).ensure(SOURCE, progress=enough)
    assert parts(tmp_path)
    assert files_of(ModelStore(tmp_path).ensure(SOURCE)) == LARGE


# --- what changes under a prefix -------------------------------------------------------------

CHANGED = {**MODEL, "model.safetensors": b"other weights"}


def test_a_changed_object_is_another_model(server: Server, tmp_path: Path) -> None:
    """A version's digest still means what it meant, also when the bucket has moved on."""
    store = ModelStore(tmp_path)
    server.put("chat/v2", MODEL)
    before = store.ensure(SOURCE)
    server.put("chat/v2", CHANGED)
    after = store.ensure(SOURCE)
    assert files_of(after) == CHANGED and after.path != before.path
    assert store.ensure(SOURCE, expected_sha256=before.sha256.upper()) == before
    with pytest.raises(ModelStoreError) as refused:
        ModelStore(tmp_path / "another").ensure(SOURCE, expected_sha256=before.sha256)
    assert refused.value.code == "checksum_mismatch"


def test_two_states_are_never_put_together(server: Server, tmp_path: Path) -> None:
    """What is changed between its listing and its reading is refused, and right the next time."""
    server.put("chat/v2", MODEL)
    bucket = Bucket(S3Source("models", "chat/v2"))
    listed = bucket.list_files(Limits())
    server.put("chat/v2", CHANGED)
    with pytest.raises(ModelStoreError, match="was changed while it was fetched") as refused:
        fetch_files(bucket, listed, tmp_path, lambda stage, fraction: None)
    assert refused.value.code == "download_failed"
    assert files_of(ModelStore(tmp_path / "cache").ensure(SOURCE)) == CHANGED


def test_of_a_listing_that_is_no_more_nothing_is_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(tmp_path, server, monkeypatch)
    reach(monkeypatch, server.url)
    server.put("chat/v2", CHANGED)
    assert files_of(ModelStore(tmp_path).ensure(SOURCE)) == CHANGED
    assert not list((tmp_path / ".staging").iterdir())


def test_without_its_server_what_was_fetched_last_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(tmp_path)
    server.put("chat/v2", MODEL)
    first = store.ensure(SOURCE)
    server.put("chat/v2", CHANGED)
    second = store.ensure(SOURCE)
    reach(monkeypatch, DEAD)
    assert store.ensure(SOURCE) == second
    assert store.ensure(SOURCE, expected_sha256=first.sha256) == first
    (second.path / "config.json").write_bytes(b"torn")
    assert store.ensure(SOURCE) == first
    assert refusal(tmp_path, "s3://models/chat").code == "download_failed"


def test_the_digest_is_that_of_the_files_and_the_identity_that_of_the_listing(
    server: Server, tmp_path: Path
) -> None:
    server.put("chat/v2", MODEL)
    model = ModelStore(tmp_path).ensure(SOURCE)
    assert model.sha256 == folder_sha256(hash_files(model.path))
    listed = Bucket(S3Source("models", "chat/v2")).list_files(Limits())
    assert model.path.parent.name.endswith(identity(listed)[:32])
    assert identity(listed) == identity(listed[::-1])
    changed = [listed[0]._replace(etag='"of others"'), *listed[1:]]
    assert identity(changed) != identity(listed)


def test_a_tag_that_is_no_md5_says_nothing(tmp_path: Path) -> None:
    """Of an object stored in parts it is one of the parts' tags, and how many they are."""
    (tmp_path / "f").write_bytes(b"weights")
    assert buckets._has_tag(tmp_path / "f", '"0123456789abcdef0123456789abcdef-2"')
    assert buckets._has_tag(tmp_path / "f", '"9a2c2a7e9a1c1a4e"')
    assert not buckets._has_tag(tmp_path / "f", '"0123456789abcdef0123456789abcdef"')
