"""SGLang's reward routes, and ETS's and REBASE's use of its `/generate`."""
