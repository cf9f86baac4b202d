"""Mounts every handler on one aiohttp application."""

from aiohttp import web

from router.http.generate import handler
from router.http.health import Health
from router.http.inspect import Inspection
from router.service import Router
from serving.http import ON_UNEXPECTED_ERROR, error_middleware
from serving.metrics import exposition_handler


def build(router: Router) -> web.Application:
    """The router's application: OpenAI's API, /v1/route, inspection, health and metrics."""
    app = web.Application(middlewares=[error_middleware], client_max_size=router.config.max_body_mb * 1024 * 1024)
    app[ON_UNEXPECTED_ERROR] = router.metrics.unexpected_error
    health, inspection = Health(router), Inspection(router)
    app.add_routes(
        [
            web.post("/v1/chat/completions", handler(router, "/v1/chat/completions")),
            web.post("/v1/completions", handler(router, "/v1/completions")),
            web.post("/v1/route", inspection.route),
            web.get("/v1/models", inspection.models),
            web.get("/v1/workers", inspection.workers),
            web.get("/v1/sources", inspection.sources),
            web.get("/debug/workers", inspection.workers),
            web.get("/debug/decisions", inspection.decisions),
            web.get("/v1/decisions/{id}", inspection.decision),
            web.post("/debug/prefix", inspection.prefix),
            web.post("/v1/workers/{id}/drain", inspection.drain),
            web.delete("/v1/workers/{id}/drain", inspection.drain),
            web.get("/health", health.health),
            web.get("/live", health.live),
            web.get("/ready", health.ready),
            web.get("/metrics", exposition_handler(router.metrics.registry)),
        ]
    )
    return app
