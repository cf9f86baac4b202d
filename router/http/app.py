"""Mounts every handler on one aiohttp application."""

from aiohttp import web

from router.http.generate import handler
from router.http.health import Health
from router.http.inspect import Inspection
from router.service import Router
from serving import http as serving_http
from serving.metrics import exposition_handler
