"""The HTTP interface (docs/api.md); the only place that imports fastapi, uvicorn, h11 and prometheus_client.

``server`` runs what ``app`` builds: ``edge`` around every request, ``guards`` before every route, and the routes
themselves in ``jobroutes``, ``changeroutes``, ``logroutes``, ``packageroutes``, ``clusterroutes``, ``tokenroutes`` and ``healthroutes``.
"""
