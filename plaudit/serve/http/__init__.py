"""HTTP: the listener, the ASGI application, authentication, admission, requests and replies. Contains no model and no
protocol code."""
