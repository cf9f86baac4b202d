"""The HTTP API: generation, inspection, health.  `app.build` mounts them."""
