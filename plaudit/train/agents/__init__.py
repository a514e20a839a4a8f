"""Episodes: turns of the policy with environments and agents."""
