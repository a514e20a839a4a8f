"""A question's tree: nodes, their costs, the frontier, and the programmes that share a budget over it. No torch, no
models."""
