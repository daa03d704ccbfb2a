"""Object stores for tests: the real clients, gcsfs and s3fs, against emulators behind a proxy with faults."""

import asyncio
import json
import re
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass

from emulators import gcs_server, s3_server
from fault_proxy import FaultProxy, fault_proxy

from efficio_ckpt import open_storage

KEY, SECRET = "AKIAEFFICIOTESTS0001", "S3cretOfTheTests/+0123456789abcdef"
TOKEN = "ya29.s3cretOfTheTests-0123456789"


@dataclass
class Service:
    """An emulator behind a proxy."""

    scheme: str
    proxy: FaultProxy
    secret: str
    options: dict
    make: object
    look: object


@dataclass
class Cloud:
    """A bucket of its own in a service."""

    service: Service
    bucket: str

    @property
    def scheme(self):
        return self.service.scheme

    @property
    def proxy(self):
        return self.service.proxy

    def open(self, path="run", *, bucket=None, **options):
        """Open the storage; the client behind it is one for all, as making one takes half a second."""
        url = f"{self.scheme}://{bucket or self.bucket}/{path}"
        return open_storage(url, **{**self.service.options, **options})

    def look(self):
        """Names and sizes of the objects, asked behind the proxy; an upload that was begun and not ended is named, too."""
        return self.service.look(self.bucket)

    def fail(self, kind, **options):
        return self.proxy.fail(kind, **options)


@contextmanager
def gcs_service():
    with fault_proxy() as proxy, gcs_server(external=proxy.url) as (host, port):
        from google.oauth2.credentials import Credentials

        proxy.upstream = url = f"http://{host}:{port}"

        def make(bucket):
            ask(f"{url}/storage/v1/b?project=p", data=json.dumps({"name": bucket}).encode())

        def look(bucket):
            found = json.loads(ask(f"{url}/storage/v1/b/{bucket}/o?maxResults=1000"))
            return {item["name"]: int(item["size"]) for item in found.get("items", [])}

        # As an object: gcsfs asks Google about a token that is given as text.
        options = {"token": Credentials(TOKEN), "endpoint_url": proxy.url, "project": "p"}
        yield Service("gs", proxy, TOKEN, options, make, look)


@contextmanager
def s3_service():
    with s3_server() as (host, port), fault_proxy(f"http://{host}:{port}") as proxy:
        url = proxy.upstream

        def make(bucket):
            ask(f"{url}/{bucket}", method="PUT")

        def look(bucket):
            found = ask(f"{url}/{bucket}?list-type=2").decode()
            entries = re.findall(r"<Key>([^<]*)</Key>.*?<Size>(\d+)</Size>", found, re.DOTALL)
            uploads = re.findall(r"<Upload>", ask(f"{url}/{bucket}?uploads").decode())
            return {**{name: int(size) for name, size in entries}, **({"unfinished": 1} if uploads else {})}

        options = {"key": KEY, "secret": SECRET, "endpoint_url": proxy.url}
        yield Service("s3", proxy, SECRET, options, make, look)


def ask(url, **options):
    headers = {"Content-Type": "application/json"} if "data" in options else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers, **options)) as answer:
        return answer.read()


SERVICES = {"gs": gcs_service, "s3": s3_service}


class Hurried:
    """The module asyncio, but that no sleep takes time: the clients wait between their own tries."""

    def __init__(self):
        self.waits = []

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds, result=None):
        self.waits.append(seconds)
        return await asyncio.sleep(0, result)


def hurry(monkeypatch):
    """Let no client wait, and return the waits that it would have made."""
    import aiobotocore.endpoint
    import gcsfs.retry
    import s3fs.core

    hurried = Hurried()
    for module in (gcsfs.retry, s3fs.core, aiobotocore.endpoint):
        monkeypatch.setattr(module, "asyncio", hurried)
    return hurried
