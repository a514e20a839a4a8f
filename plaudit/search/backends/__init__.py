"""The models of a search: who writes steps, who scores them, which steps are alike; in this process or over HTTP."""
