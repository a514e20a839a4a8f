"""A question's tree: nodes, their costs, the frontier, and the integer programs that select leaves. Needs no torch and
no models."""
