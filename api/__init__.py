"""The HTTP surface; the only place that imports fastapi."""
