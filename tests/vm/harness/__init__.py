"""Debian guests under QEMU with the interface of the NixOS test driver; see ../README.md."""
