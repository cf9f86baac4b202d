"""Mounts every handler on one aiohttp application."""

from aiohttp import web

from serving.http import ON_UNEXPECTED_ERROR, error_middleware
from serving.metrics import exposition_handler
from worker.http.generate import Generate
from worker.http.inspect import Inspection
from worker.service import Worker


def build(worker: Worker) -> web.Application:
    """The worker's application."""
    app = web.Application(middlewares=[error_middleware], client_max_size=worker.config.max_body_mb * 1024 * 1024)
    app[ON_UNEXPECTED_ERROR] = worker.metrics.unexpected
    generate, inspection = Generate(worker), Inspection(worker)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions", generate.completion),
            web.get("/v1/models", inspection.models),
            web.get("/v1/models/{name}", inspection.model),
            web.post("/tokenize", inspection.tokenize),
            web.post("/detokenize", inspection.detokenize),
            web.get("/health", inspection.health),
            web.get("/live", inspection.live),
            web.get("/ready", inspection.ready),
            web.get("/metrics", exposition_handler(worker.registry)),
        ]
    )
    return app
