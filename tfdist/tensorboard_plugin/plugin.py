# SPDX-License-Identifier: Apache-2.0
"""The TensorBoard plugin: which routes there are. `answers` says what each sends."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import werkzeug
from tensorboard.backend import http_util
from tensorboard.compat import tf
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from tfdist.tensorboard_plugin import answers
from tfdist.tensorboard_plugin.jobs import Job, Jobs
from tfdist.update_log import Files, LocalFiles

_STATIC = pathlib.Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_LOGGER = logging.getLogger("tfdist")
_NO_LOGDIR = "TensorBoard was started without --logdir; the tfdist page reads update logs below a log directory"


class TfdistPlugin(base_plugin.TBPlugin):
    """Serves the page and its data, and nothing else: a job is named by an identifier, never by a path."""

    plugin_name = "tfdist"

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._logdir = context.logdir or ""
        self._jobs = Jobs(self._logdir, _files(self._logdir)) if self._logdir else None

    def is_active(self) -> bool:
        """Returns True once a log was seen. Looking for logs is done in the background."""
        return self._jobs is not None and self._jobs.look()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Returns the page's entry."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="tfdist")

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Returns the routes: one for each file of the page, and those of the data."""
        files = {f"/{path.name}": _file(path) for path in sorted(_STATIC.iterdir()) if path.suffix in _TYPES}
        return {
            **files,
            "/jobs": self._route(self._list),
            "/workers": self._route(lambda request: answers.workers(self._job(request))),
            "/window": self._route(self._window),
            "/scalars": self._route(lambda request: self._known().scalars(self._job(request))),
            "/advice": self._route(lambda request: self._job(request).advisor.answer()),
        }

    def _route(self, answer: Callable[[wrappers.Request], Any]) -> Callable[..., Any]:
        """Wraps an answer, so that whatever goes wrong is one line on the page and TensorBoard goes on."""

        @wrappers.Request.application
        def respond(request: wrappers.Request) -> werkzeug.Response:
            try:
                content = answer(request)
            except answers.BadRequestError as error:
                return http_util.Respond(request, {"error": str(error)}, "application/json", 400)
            except OSError as error:
                return http_util.Respond(request, {"error": f"can't read the logs: {error}"}, "application/json", 503)
            except Exception as error:
                _LOGGER.exception("the tfdist plugin failed at %s", request.path)
                return http_util.Respond(request, {"error": repr(error)}, "application/json", 500)
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
            return http_util.Respond(request, content, kind)

        return respond

    def _known(self) -> Jobs:
        if self._jobs is None:
            raise answers.BadRequestError(_NO_LOGDIR)
        return self._jobs

    def _job(self, request: wrappers.Request) -> Job:
        job = self._known().get(request.args.get("job", ""))
        if job is None:
            raise answers.BadRequestError("there is no such job; the log directory may have changed: reload the page")
        return job

    def _list(self, request: wrappers.Request) -> dict[str, Any]:
        return answers.jobs(*self._known().all(), self._logdir)

    def _window(self, request: wrappers.Request) -> bytes:
        job = self._job(request)
        begin, end = (_number(request, name, float) for name in ("begin", "end"))
        return answers.window(job, begin, end, _number(request, "buckets", int))


def _number(request: wrappers.Request, name: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(request.args[name])
    except (KeyError, ValueError, OverflowError):
        raise answers.BadRequestError(f"{name} must be a number. Received: {name}={request.args.get(name)!r}") from None


def _file(path: pathlib.Path) -> Callable[..., Any]:
    @wrappers.Request.application
    def respond(request: wrappers.Request) -> werkzeug.Response:
        return http_util.Respond(request, path.read_bytes(), _TYPES[path.suffix])

    return respond


def _files(logdir: str) -> Files:
    return RemoteFiles() if "://" in logdir else LocalFiles()


class RemoteFiles:
    """Files that TensorBoard can read, in an object store, for instance."""

    def read(self, path: str, offset: int = 0) -> bytes:
        """Returns the content of a file from an offset on."""
        try:
            with tf.io.gfile.GFile(path, "rb") as file:
                return file.read()[offset:]
        except tf.errors.OpError as error:
            raise FileNotFoundError(str(error)) from error

    def entries(self, directory: str) -> tuple[list[str], list[str]]:
        """Returns the names of the subdirectories and of the files in a directory; none if it doesn't exist."""
        try:
            for _, directories, files in tf.io.gfile.walk(directory):
                return sorted(each.rstrip("/") for each in directories), sorted(files)
        except tf.errors.OpError:
            pass
        return [], []

    def write(self, path: str, data: bytes) -> None:
        """Raises: the page only reads."""
        raise PermissionError(f"the tfdist page writes no files: {path}")

    def remove(self, path: str) -> None:
        """Raises: the page only reads."""
        raise PermissionError(f"the tfdist page removes no files: {path}")

    def claim_directory(self, path: str) -> bool:
        """Raises: the page only reads."""
        raise PermissionError(f"the tfdist page makes no directories: {path}")
