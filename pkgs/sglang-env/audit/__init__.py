"""Programs that inspect the locked wheels: ELF closure, GPU code, index and licences, SBOM.

Each part has a pure half that judges data (tested without wheels) and a half that reads wheels.
What may be missing and what comes from where is said once, in `libraries.json`, which
`overrides.nix` reads too.
"""
