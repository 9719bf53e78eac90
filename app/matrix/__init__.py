"""`routepack verify --matrix`: every supported layout of training state, moved and compared."""
