"""Fetching from a Hugging Face hub, against a small server that speaks its API."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.fetch import Limits
from gpuagent.agent.model_store.store import ModelStore

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"boom",
}


class Hub(BaseHTTPRequestHandler):
    """The model info and file routes of one repository, org/name at main."""

    files = FILES

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        path = self.path.partition("?")[0]
        if path in (
            "/api/models/org/name/revision/main",
            f"/api/models/org/name/revision/{COMMIT}",
        ):
            siblings = [{"rfilename": n, "size": len(c)} for n, c in self.files.items()]
            body = {"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(body).encode(), with_body)
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in self.files.items()
            ]
            self.send(200, json.dumps(tree).encode(), with_body)
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self.send(200, self.files[path.rpartition("/")[2]], with_body)
        else:
            self.send(404, b"{}", with_body)

    def send(self, status, body, with_body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args):
        """Quiet."""


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_only_weights_and_tokenizer_files_are_fetched(tmp_path, endpoint):
    model = ModelStore(tmp_path, hub_endpoint=endpoint).ensure("hf://org/name@main")
    found = {p.relative_to(model.path).as_posix(): p.read_bytes() for p in model.path.rglob("*")}
    wanted = ("config.json", "model.safetensors", "tokenizer.json")
    assert found == {name: FILES[name] for name in wanted}


def test_a_fetched_repository_is_served_from_the_cache(tmp_path, endpoint):
    store = ModelStore(tmp_path, hub_endpoint=endpoint)
    model = store.ensure("hf://org/name@main")
    assert (
        ModelStore(tmp_path, hub_endpoint="http://127.0.0.1:9").ensure("hf://org/name@main")
        == model
    )


@pytest.mark.parametrize(
    ("code", "source", "files", "limits"),
    [
        ("download_failed", "hf://org/absent@main", FILES, Limits()),
        ("format_not_allowed", "hf://org/name@main", {"a.bin": b"x"}, Limits()),
        ("too_large", "hf://org/name@main", FILES, Limits(download_bytes=5)),
    ],
)
def test_what_cannot_be_fetched_has_a_code(
    tmp_path, endpoint, monkeypatch, code, source, files, limits
):
    monkeypatch.setattr(Hub, "files", files)
    with pytest.raises(ModelStoreError) as refusal:
        ModelStore(tmp_path, limits=limits, hub_endpoint=endpoint).ensure(source)
    assert refusal.value.code == code
    assert "\n" not in refusal.value.message and "reached" not in refusal.value.message


def test_no_server_is_a_failed_download(tmp_path):
    with pytest.raises(ModelStoreError) as refusal:
        ModelStore(tmp_path, hub_endpoint="http://127.0.0.1:9").ensure("hf://org/name@main")
    assert refusal.value.code == "download_failed"
    assert refusal.value.message.startswith("http://127.0.0.1:9 could not be reached: ")


def test_a_host_without_an_address_is_named(tmp_path):
    with pytest.raises(ModelStoreError, match=r"http://no\.such\.invalid could not be reached"):
        ModelStore(tmp_path, hub_endpoint="http://no.such.invalid").ensure("hf://org/name@main")
