"""A small Hub: as much of its HTTP interface as a checkpoint meets, in memory, with faults to order.

Tokens: ``hf_write`` and ``hf_read`` of the user ``me``, ``hf_other`` of another one, ``hf_fine`` with rights on one
repository and ``hf_vague``, which does not say what it may do (and may do all that ``me`` may).
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import faults

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc).isoformat().replace("+00:00", ".000Z")
# Longer than any file of the tests: a download cannot be continued behind it.
PAGE = b"<html><head><title>Sign in</title></head><body>" + b"Welcome to the airport. " * 2000


def access(role, **more):
    return {"type": "access_token", "accessToken": {"displayName": "t", "role": role, **more}}


def fine_grained(*scopes):
    return access(
        "fineGrained",
        fineGrained={
            "scoped": [{"entity": entity, "permissions": list(rights)} for entity, rights in scopes]
        },
    )


USERS = {
    "hf_write": ("me", access("write")),
    "hf_read": ("me", access("read")),
    "hf_other": ("other", access("write")),
    "hf_fine": (
        "me",
        fine_grained(({"type": "model", "name": "me/run"}, ["repo.content.read", "repo.write"])),
    ),
    "hf_vague": ("me", {"type": "unheard-of"}),
}
WRITERS = {"hf_write", "hf_other", "hf_fine", "hf_vague"}


@dataclass
class Repo:
    owner: str
    private: bool
    commits: dict[str, tuple[str | None, dict]] = field(default_factory=dict)  # oid: parent, path: file
    head: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # sha256: content
    names: dict[str, str] = field(default_factory=dict)  # sha256: a path that held it

    def commit(self, tree, title):
        oid = hashlib.sha1(f"{title}{len(self.commits)}{self.head}".encode()).hexdigest()
        self.commits[oid] = (self.head or None, tree)
        self.head = oid
        return oid

    @property
    def tree(self):
        return self.commits[self.head][1]

    def history(self):
        oid = self.head
        while oid:
            yield oid
            oid = self.commits[oid][0]

    def revision(self, name):
        oid = self.head if name == "main" else self.tags.get(name, name)
        return oid if oid in self.commits else None


@dataclass
class Fault(faults.Fault):
    """A fault whose ``kind`` is a status, or a word that `Handler.suffer` knows."""

    answer: int = 0  # after a "lost" request: the status instead of silence; 200 for a page of HTML


class HubServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.RLock()
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.seen: list[str] = []
        self.quota = None
        self.part_bytes = None
        self.page = 1000
        self.parts: dict[str, dict[int, bytes]] = {}
        self.before_commit = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def make(self, name, *, private=True, token="hf_write"):
        repo = self.repos[name] = Repo(USERS[token][0], private)
        repo.commit({".gitattributes": regular(b"*.safetensors filter=lfs\n")}, "initial commit")
        return repo

    def fail(self, kind, **options):
        self.faults.append(Fault(kind, **options))
        return self.faults[-1]

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is part of the tests


def regular(data):
    return {
        "data": data,
        "size": len(data),
        "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HubServer

    def log_message(self, *args):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def do_GET(self):
        self.answer_with_faults()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # Faults

    def answer_with_faults(self):
        url = urlsplit(self.path)
        self.route, self.query = unquote(url.path), parse_qs(url.query)
        self.fault = None
        with self.server.lock:
            self.server.log.append(f"{self.command} {self.route}")
            self.server.seen.append(self.headers.get("Authorization", ""))
            for fault in self.server.faults:
                if fault.takes(self.command, self.route):
                    self.fault = fault
                    break
            if self.fault:
                self.server.faults += self.fault.then
        length = int(self.headers.get("Content-Length") or 0)
        if self.fault and self.fault.kind == "drop":
            self.rfile.read(min(length, 100))
            return self.hang_up()
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            self.body = b"".join(iter(self.read_chunk, b""))
        else:
            self.body = self.rfile.read(length)
        if self.fault and isinstance(self.fault.kind, int):
            return self.send(self.fault.kind, self.fault.body, **self.fault.headers)
        if self.fault and self.fault.kind == "reset":
            return self.hang_up()
        if self.fault and self.fault.kind == "html":
            return self.send(200, PAGE, **{"Content-Type": "text/html"})
        return self.dispatch()

    def read_chunk(self):
        size = int(self.rfile.readline().split(b";")[0], 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def hang_up(self):
        self.close_connection = True
        # A reset rather than an orderly end
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def send(self, status, body=b"", **headers):
        kind = self.fault.kind if self.fault else None
        if kind == "lost":
            answer, self.fault = self.fault.answer, None
            return self.send(answer, PAGE) if answer else self.hang_up()
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        declared = len(body)
        if self.command == "GET" and status in (200, 206):
            if kind == "truncate":
                body = body[: len(body) // 2]
            elif kind == "short":
                body = body[: len(body) // 2]
                declared = len(body)
            elif kind == "flip" and body:
                middle = len(body) // 2
                body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if not (self.command == "HEAD" and status == 200 and "Content_Length" in headers):
            self.send_header("Content-Length", str(declared))
        self.end_headers()
        if self.command != "HEAD":
            if kind == "slow":
                for start in range(0, len(body), max(1, len(body) // 4)):
                    time.sleep(self.fault.seconds)
                    self.wfile.write(body[start : start + max(1, len(body) // 4)])
                    self.wfile.flush()
            else:
                self.wfile.write(body)
        if kind == "truncate":
            self.wfile.flush()
            self.close_connection = True
        return None

    def refuse(self, status, message, code=None):
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        return self.send(status, {"error": message}, **headers)

    # Who asks, and for what

    @property
    def token(self):
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def dispatch(self):
        # Storage takes signed addresses, not tokens.
        for pattern, answer in STORAGE_ROUTES:
            match = re.fullmatch(pattern, f"{self.command} {self.route}")
            if match:
                if self.token:
                    return self.refuse(400, "a token was sent to the storage")
                return answer(self, **match.groupdict())
        if self.token and self.token not in USERS:
            return self.refuse(401, "Invalid credentials in Authorization header")
        for pattern, answer in ROUTES:
            match = re.fullmatch(pattern, f"{self.command} {self.route}")
            if match:
                groups = match.groupdict()
                if "repo" in groups:
                    groups["repo"] = self.find(groups["repo"])
                    if groups["repo"] is None:
                        return self.refuse(404 if self.token else 401, "Repository not found", "RepoNotFound")
                    if (
                        self.command != "GET"
                        and self.command != "HEAD"
                        and not self.may_write(groups["repo"])
                    ):
                        return self.refuse(403, "Forbidden: you must use a write token to upload")
                with self.server.lock:
                    return answer(self, **groups)
        return self.refuse(404, f"no such route: {self.command} {self.route}")

    def find(self, name):
        repo = self.server.repos.get(name)
        user = USERS.get(self.token, ("", None))[0]
        return repo if repo and (not repo.private or user == repo.owner) else None

    def may_write(self, repo):
        return self.token in WRITERS and USERS[self.token][0] == repo.owner

    # The interface

    def whoami(self):
        if not self.token:
            return self.refuse(401, "Invalid username or password.")
        name, auth = USERS[self.token]
        return self.send(200, {"type": "user", "name": name, "orgs": [], "auth": auth})

    def create(self):
        asked = json.loads(self.body)
        user = USERS.get(self.token, ("", None))[0]
        name = f"{asked.get('organization') or user}/{asked['name']}"
        if self.token not in WRITERS or name.split("/")[0] != user:
            return self.refuse(403, f"You don't have the rights to create a model under {name}")
        with self.server.lock:
            if name in self.server.repos:
                return self.send(409, {"error": "exists", "url": f"{self.server.url}/{name}"})
            private = asked.get("visibility") == "private" or asked.get("private") is True
            self.server.make(name, private=private, token=self.token)
        return self.send(200, {"url": f"{self.server.url}/{name}"})

    def info(self, repo, revision="main"):
        oid = repo.revision(revision)
        if oid is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        name = self.route.split("/revision")[0].removeprefix("/api/models/")
        siblings = [{"rfilename": path} for path in repo.commits[oid][1]]
        return self.send(
            200, {"id": name, "modelId": name, "sha": oid, "private": repo.private, "siblings": siblings}
        )

    def list_tree(self, repo, revision, path=None):
        oid = repo.revision(revision)
        if oid is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        prefix = path.strip("/") + "/" if path else ""
        files = {name: file for name, file in repo.commits[oid][1].items() if name.startswith(prefix)}
        if prefix and not files:
            return self.refuse(404, f"{path} does not exist on {revision}", "EntryNotFound")
        entries = []
        folders = {name.rsplit("/", up)[0] for name in files for up in range(1, name.count("/") + 1)}
        entries += [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders]
        for name, file in files.items():
            entry = {"type": "file", "path": name, "oid": file["oid"], "size": file["size"]}
            if "sha256" in file:
                entry["lfs"] = {"oid": file["sha256"], "size": file["size"], "pointerSize": 134}
            entries.append(entry)
        entries.sort(key=lambda entry: entry["path"])
        start = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if start + self.server.page < len(entries):
            again = (
                f"{self.server.url}{self.path.split('?')[0]}?recursive=True&cursor={start + self.server.page}"
            )
            headers["Link"] = f'<{again}>; rel="next"'
        return self.send(200, entries[start : start + self.server.page], **headers)

    def preupload(self, repo, revision):
        answers = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": repo.tree.get(file["path"], {}).get("oid"),
            }
            for file in json.loads(self.body)["files"]
        ]
        ignored = ".gitignore" in repo.tree and "gitIgnore" not in json.loads(self.body)
        return self.send(200, {"files": [{**answer, "shouldIgnore": ignored} for answer in answers]})

    def batch(self, repo):
        answers = []
        name = self.route.removeprefix("/").partition(".git/")[0]
        for asked in json.loads(self.body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            answer = {"oid": oid, "size": size}
            answers.append(answer)
            if oid in repo.objects:
                continue
            used = sum(map(len, repo.objects.values()))
            if self.server.quota is not None and used + size > self.server.quota:
                return self.refuse(
                    403, "Private repository storage limit reached, please upgrade your plan to increase it"
                )
            base = self.server.url.replace("127.0.0.1", "localhost")
            target = {"href": f"{base}/storage/{name}/{oid}?X-Signature=s1gned"}
            if self.server.part_bytes:
                count = -(-size // self.server.part_bytes)
                target = {
                    "href": f"{base}/complete/{name}/{oid}",
                    "header": {
                        "chunk_size": str(self.server.part_bytes),
                        **{f"{n:05d}": f"{base}/part/{oid}/{n}" for n in range(1, count + 1)},
                    },
                }
            verify = {"href": f"{self.server.url}/verify/{name}"}
            answer["actions"] = {"upload": target, "verify": verify}
        return self.send(200, {"transfer": "basic", "objects": answers})

    def put_object(self, name, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.refuse(400, "the content is not what its digest says")
        self.server.repos[name].objects[oid] = self.body
        return self.send(200)

    def put_part(self, oid, number):
        self.server.parts.setdefault(oid, {})[int(number)] = self.body
        return self.send(200, ETag=f'"{oid[:8]}-{number}"')

    def complete(self, name, oid):
        parts = self.server.parts.pop(oid)
        self.body = b"".join(parts[number] for number in sorted(parts))
        return self.put_object(name, oid)

    def verify_object(self, repo):
        asked = json.loads(self.body)
        found = len(repo.objects.get(asked["oid"], b"")) == asked["size"]
        return self.send(200, {}) if found else self.refuse(404, "it was never uploaded")

    def commit(self, repo, revision):
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        for action in [self.server.before_commit.pop(0)] if self.server.before_commit else []:
            action(repo)
        if header.get("parentCommit") not in {None, repo.head}:
            return self.refuse(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(repo.tree)
        for line in lines[1:]:
            path = line["value"]["path"]
            if line["key"] == "file":
                tree[path] = regular(base64.b64decode(line["value"]["content"]))
            elif line["key"] == "lfsFile":
                sha256, size = line["value"]["oid"], line["value"]["size"]
                if len(repo.objects.get(sha256, b"")) != size:
                    return self.refuse(400, f"LFS pointer of {path} points to no object")
                pointer = f"version 1\noid sha256:{sha256}\nsize {size}\n".encode()
                tree[path] = {"sha256": sha256, "size": size, "oid": regular(pointer)["oid"]}
                repo.names[sha256] = path
            elif line["key"] == "deletedFile":
                if tree.pop(path, None) is None:
                    return self.refuse(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            else:
                return self.refuse(400, f"unknown operation {line['key']}")
        oid = repo.commit(tree, header["summary"])
        name = self.route.removeprefix("/api/models/").partition("/commit/")[0]
        return self.send(200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid})

    def resolve(self, repo, revision, path):
        oid = repo.revision(revision)
        if oid is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        file = repo.commits[oid][1].get(path)
        if file is None or ("sha256" in file and file["sha256"] not in repo.objects):
            return self.refuse(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": oid, "ETag": f'"{file["oid"]}"'}
        if "sha256" in file:
            name = self.route.removeprefix("/").partition("/resolve/")[0]
            base = self.server.url.replace("127.0.0.1", "localhost")
            headers |= {"X-Linked-Etag": f'"{file["sha256"]}"', "X-Linked-Size": str(file["size"])}
            return self.send(
                302, Location=f"{base}/storage/{name}/{file['sha256']}?X-Signature=s1", **headers
            )
        if self.command == "HEAD":
            return self.send(200, b"", Content_Length=str(file["size"]), **headers)
        return self.send_range(file["data"], headers)

    def get_object(self, name, oid):
        return self.send_range(self.server.repos[name].objects[oid], {})

    def send_range(self, data, headers):
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not match:
            return self.send(200, data, **headers)
        start = int(match[1])
        return self.send(
            206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}", **headers
        )

    def list_commits(self, repo, revision):
        ids = list(repo.history())
        return self.send(
            200,
            [{"id": oid, "title": "t", "message": "", "date": NOW, "authors": []} for oid in ids],
        )

    def refs(self, repo):
        branches = [{"name": "main", "ref": "refs/heads/main", "targetCommit": repo.head}]
        tags = [
            {"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid} for name, oid in repo.tags.items()
        ]
        return self.send(200, {"branches": branches, "converts": [], "tags": tags, "pullRequests": []})

    def squash(self, repo, revision):
        tree = repo.tree
        repo.head = ""
        kept = {oid: repo.commits[oid] for oid in repo.tags.values()}
        squashed = len(repo.commits)
        repo.commits = kept
        repo.commit(tree, f"squash {squashed}")
        return self.send(200, {})

    def list_objects(self, repo):
        return self.send(
            200,
            [
                {
                    "fileOid": oid,
                    "oid": oid,
                    "filename": repo.names.get(oid, ""),
                    "pushedAt": NOW,
                    "size": len(data),
                }
                for oid, data in repo.objects.items()
            ],
        )

    def delete_objects(self, repo):
        for oid in json.loads(self.body)["deletions"]["sha"]:
            repo.objects.pop(oid, None)
        return self.send(200, {})


NAME = r"[^/]+/[^/]+"
STORAGE_ROUTES = [
    (rf"PUT /storage/(?P<name>{NAME})/(?P<oid>\w+)", Handler.put_object),
    (rf"GET /storage/(?P<name>{NAME})/(?P<oid>\w+)", Handler.get_object),
    (r"PUT /part/(?P<oid>\w+)/(?P<number>\d+)", Handler.put_part),
    (rf"POST /complete/(?P<name>{NAME})/(?P<oid>\w+)", Handler.complete),
]
ROUTES = [
    (r"GET /api/whoami-v2", Handler.whoami),
    (r"POST /api/repos/create", Handler.create),
    (rf"GET /api/models/(?P<repo>{NAME})", Handler.info),
    (rf"GET /api/models/(?P<repo>{NAME})/revision/(?P<revision>[^/]+)", Handler.info),
    (rf"GET /api/models/(?P<repo>{NAME})/tree/(?P<revision>[^/]+)(?P<path>/.*)?", Handler.list_tree),
    (rf"POST /api/models/(?P<repo>{NAME})/preupload/(?P<revision>[^/]+)", Handler.preupload),
    (rf"POST /(?P<repo>{NAME})\.git/info/lfs/objects/batch", Handler.batch),
    (rf"POST /verify/(?P<repo>{NAME})", Handler.verify_object),
    (rf"POST /api/models/(?P<repo>{NAME})/commit/(?P<revision>[^/]+)", Handler.commit),
    (rf"(?:GET|HEAD) /(?P<repo>{NAME})/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    (rf"GET /api/models/(?P<repo>{NAME})/commits/(?P<revision>[^/]+)", Handler.list_commits),
    (rf"GET /api/models/(?P<repo>{NAME})/refs", Handler.refs),
    (rf"POST /api/models/(?P<repo>{NAME})/super-squash/(?P<revision>[^/]+)", Handler.squash),
    (rf"GET /api/models/(?P<repo>{NAME})/lfs-files", Handler.list_objects),
    (rf"POST /api/models/(?P<repo>{NAME})/lfs-files/batch", Handler.delete_objects),
]


@contextmanager
def hub_server():
    """Serve an empty Hub on a port of this machine while the block runs."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
