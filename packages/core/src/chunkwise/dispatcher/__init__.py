"""The dispatcher: finds backends, chooses a route for each call, explains the choice."""
