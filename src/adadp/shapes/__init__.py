"""How large gradients are in each direction of a parameter, and where that knowledge comes from."""
