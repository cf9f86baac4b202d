"""The router's parts, wired once by `main` and asked by the HTTP handlers."""

from dataclasses import dataclass
from typing import Protocol

import aiohttp

from kvevents.consumer import EventConsumer
from router.config import RouterConfig
from router.errors import too_long, unknown_model
from router.fleet import Fleet
from router.in_flight import InFlight
from router.index.catalog import IndexCatalog
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.placement import Decision, Placer
from router.prompt import PromptTokens
from router.proxy import Timeouts
from router.receipts import Receipts
from router.request import RoutedRequest
from router.tokenize import PromptReader


class BusState(Protocol):
    """What readiness needs to know of the bus."""

    @property
    def connected(self) -> bool:
        """Whether the connection is up now."""
        ...


@dataclass(slots=True)
class Router:
    """One router process: state holders and the steps from a request to a decision."""

    config: RouterConfig
    bus: BusState
    consumer: EventConsumer
    catalog: IndexCatalog
    ledger: LoadLedger
    fleet: Fleet
    placer: Placer
    reader: PromptReader
    session: aiohttp.ClientSession
    metrics: RouterMetrics
    in_flight: InFlight
    receipts: Receipts
    draining: bool = False

    @property
    def timeouts(self) -> Timeouts:
        """Seconds for each phase of a forwarded request."""
        config = self.config
        return Timeouts(config.connect_timeout_s, config.request_timeout_s, config.idle_timeout_s)

    async def tokens_of(self, request: RoutedRequest) -> PromptTokens:
        """Check the model, tokenise, check the length.  Raises OpenAIError 404 or 400."""
        workers = self.fleet.of_model(request.model)
        if not workers:
            raise unknown_model(request.model, self.fleet.models())
        with self.metrics.stage("tokenize"):
            tokens = await self.reader.read(request, self.fleet.ready(request.model))
        longest = max(view.beat.max_sequence_length for view in workers)
        if tokens.ids is not None and longest and tokens.count > longest:
            raise too_long(tokens.count, longest)
        return tokens

    def decide(
        self,
        request: RoutedRequest,
        tokens: PromptTokens,
        *,
        session: str | None,
        force: str | None,
        without: tuple[str, ...] = (),
    ) -> Decision:
        """Choose a worker; books nothing.  Raises OpenAIError 404 (forced worker) or 503 (none ready)."""
        with self.metrics.stage("decide"):
            return self.placer.decide(request.model, tokens, session=session, force=force, without=without)

    def why_not_ready(self) -> str | None:
        """Why the router should get no traffic; None when it should."""
        if self.draining:
            return "shutting down"
        if not self.bus.connected:
            return "the bus is not connected: no worker can be discovered or followed"
        return None
