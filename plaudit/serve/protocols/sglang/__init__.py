"""SGLang's reward routes, and the step scores that ETS and REBASE request through its `/generate`."""
