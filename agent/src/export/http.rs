//! HTTP server of the agent.
