"""The models of a search: the policy, the scorer and step clustering; in this process or over HTTP."""
