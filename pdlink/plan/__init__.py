"""How many prefill and decode workers a traffic needs: curves of a worker, a closed form, a simulation, a sweep."""
