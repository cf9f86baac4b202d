"""GET /live, /health and /ready: the process answers; it is well; it should get traffic."""

import msgspec
from aiohttp import web

from router.service import Router


class Health:
    """Liveness depends on nothing but the process, so that a broken bus never restarts it."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def live(self, request: web.Request) -> web.Response:
        """200 while the event loop runs."""
        return web.json_response({"status": "live"})

    async def health(self, request: web.Request) -> web.Response:
        """200 with the state of the bus and of the workers."""
        return web.Response(body=msgspec.json.encode(self._summary()), content_type="application/json")

    async def ready(self, request: web.Request) -> web.Response:
        """200 when traffic is welcome, else 503 and why."""
        why_not = self._router.why_not_ready()
        return web.Response(
            status=200 if why_not is None else 503,
            body=msgspec.json.encode({"ready": why_not is None, "why_not": why_not, **self._summary()}),
            content_type="application/json",
        )

    def _summary(self) -> dict[str, object]:
        fleet = self._router.fleet
        views = list(fleet.workers().values())
        return {
            "status": "ok" if self._router.bus.connected else "degraded",
            "bus_connected": self._router.bus.connected,
            "workers": len(views),
            "workers_ready": sum(fleet.why_not(view) is None for view in views),
            "sources_without_blocks": sum(source.blocks == 0 for view in views for source in view.sources.values()),
            "models": fleet.models(),
            "policy": self._router.placer.policy_name,
        }
