"""One file for each kind of device that MSL is lowered for."""
