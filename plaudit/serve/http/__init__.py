"""HTTP: the listener, the ASGI application, authentication, admission, requests and replies. No model, no protocol."""
