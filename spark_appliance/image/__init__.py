"""The container image: pinned Debian packages and wheels, streamed into an OCI layout.

No container engine, no root, no chroot, no emulator and no package script takes part, so that
everybody gets the same bytes. ``recipe`` says what is wanted, ``lock`` pins it, ``store`` holds
the files, ``plan`` turns them into trees, ``build`` writes the image.
"""
