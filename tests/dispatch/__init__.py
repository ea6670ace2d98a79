"""Tests of the choice of a backend, on fake devices and fake toolchains."""
