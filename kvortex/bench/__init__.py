"""Multi-turn load on real servers over HTTP: play it, measure it, compare servers started in turn. Imports no vLLM."""
