"""Ray: hosts that are bundles of a placement group, and agents that are children of actors."""
