"""Downloads from a local server: resumed, checked, refused."""

import hashlib
import http.server
import socket
import threading

import pytest

from adadp.data import CorruptDataError, DataNotFoundError, load, standard
from adadp.data.catalogue import Download
from adadp.data.download import DownloadError, fetch

CONTENT = bytes(range(256)) * 4_000


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT; the path says how: /good, /norange, /short (cuts off), /bad (a wrong byte), ..."""

    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Range")))
        content = {"/bad": CONTENT[:-1] + b"?", "/small": CONTENT[:500]}.get(self.path, CONTENT)
        start = 0
        if self.headers.get("Range") and self.path != "/norange":
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_error(416)
                return
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(206 if start else 200)
        if self.path != "/endless":
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.path == "/short" and not start:
            self.wfile.write(content[:300_000])
            return
        self.wfile.write(content[start:])
        if self.path == "/endless":
            self.wfile.write(b"x" * 100_000)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.requests = []
        running.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def source(server, path, algorithm="sha256"):
    return Download(server.url + path, len(CONTENT), algorithm, hashlib.new(algorithm, CONTENT).hexdigest())


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_a_download_is_checked_and_named(server, tmp_path, algorithm):
    target = fetch(source(server, "/good", algorithm), tmp_path / "new" / "file", progress=False)
    assert target.read_bytes() == CONTENT
    assert [f.name for f in target.parent.iterdir()] == ["file"]


def test_it_goes_on_where_it_broke_off(server, tmp_path):
    with pytest.raises(DownloadError, match="300000 of"):
        fetch(source(server, "/short"), tmp_path / "file", progress=False)
    assert not (tmp_path / "file").exists()
    assert (tmp_path / "file.part").stat().st_size == 300_000
    fetch(source(server, "/short"), tmp_path / "file", progress=False)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requests == [("/short", None), ("/short", "bytes=300000-")]


def test_a_server_without_ranges_sends_it_all(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    assert fetch(source(server, "/norange"), tmp_path / "file", progress=False).read_bytes() == CONTENT
    assert len(server.requests) == 1


@pytest.mark.parametrize("part", [b"rubbish", b"x" * len(CONTENT), b"x" * (len(CONTENT) + 5)])
def test_a_part_of_something_else_is_dropped(server, tmp_path, part):
    (tmp_path / "file.part").write_bytes(part)
    assert fetch(source(server, "/good"), tmp_path / "file", progress=False).read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_dropped(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DownloadError, match="broke off after 500 of"):
        fetch(source(server, "/small"), tmp_path / "file", progress=False)


def test_a_finished_part_needs_no_server(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    assert fetch(source(server, "/good"), tmp_path / "file", progress=False).read_bytes() == CONTENT
    assert server.requests == []


@pytest.mark.parametrize("path", ["/bad", "/endless"])
def test_wrong_content_is_refused_and_deleted(server, tmp_path, path):
    with pytest.raises(CorruptDataError, match="checksum"):
        fetch(source(server, path), tmp_path / "file", progress=False)
    assert not list(tmp_path.iterdir())


def test_no_such_file_and_no_network(server, tmp_path):
    with pytest.raises(DownloadError, match="404"):
        fetch(source(server, "/missing"), tmp_path / "file", progress=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    dead = Download(f"http://127.0.0.1:{port}/x", 1, "sha256", "")
    with pytest.raises(DownloadError, match="could not be fetched"):
        fetch(dead, tmp_path / "file", progress=False)


def test_progress_bar(server, tmp_path, capsys):
    assert fetch(source(server, "/good"), tmp_path / "file", progress=True).exists()


def test_load_downloads_into_the_cache_and_says_what_to_do_when_it_cannot(server, own_cache, monkeypatch, tmp_path):
    import dataclasses
    import gzip

    from adadp.data.catalogue import CATALOGUE

    header = bytes([0, 0, 8, 1, 0, 0, 0, 3])
    packed = gzip.compress(header + bytes([1, 2, 3]))
    monkeypatch.setitem(globals(), "CONTENT", packed)
    content = CATALOGUE["mnist"].content["train"]
    digest = hashlib.sha256(gzip.decompress(packed)).hexdigest()
    part = dataclasses.replace(content.labels, digest=digest, download=source(server, "/good"))
    # The same small array stands for images and for labels: only the way it takes is tested here.
    split = dataclasses.replace(content, images=dataclasses.replace(part, file="images"), labels=part)
    entry = dataclasses.replace(CATALOGUE["mnist"], content={"train": split})
    monkeypatch.setitem(standard.CATALOGUE, "mnist", entry)
    monkeypatch.setattr(
        standard.idx, "read", lambda s, p: read(s, p) if s.file != "images" else read(s, p).reshape(3, 1, 1)
    )
    with pytest.raises(DataNotFoundError, match="downloading is off"):
        load("mnist")
    monkeypatch.delenv("ADADP_OFFLINE")
    with pytest.raises(DataNotFoundError, match="downloading is off"):
        load("mnist", download=False)
    assert load("mnist").labels.tolist() == [1, 2, 3]
    assert sorted(f.name for f in (own_cache / "data" / "mnist").iterdir()) == [
        "images.gz",
        f"{part.file}.gz",
    ]
    count = len(server.requests)
    assert len(load("mnist")) == 3
    assert len(server.requests) == count
    for file in (own_cache / "data" / "mnist").iterdir():
        file.unlink()
    monkeypatch.setattr(standard, "fetch", lambda *a, **k: (_ for _ in ()).throw(DownloadError("no route")))
    with pytest.raises(DataNotFoundError, match="no route"):
        load("mnist")


read = standard.idx.read
