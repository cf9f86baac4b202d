"""Tests of the worker over HTTP."""
