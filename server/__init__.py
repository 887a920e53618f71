"""Twinpane: an OpenAI-compatible inference server for hybrid sliding-window models."""

__version__ = "0.1.0"
