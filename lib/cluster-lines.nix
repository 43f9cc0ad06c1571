# Hash of a cluster file's lines without comments and blank lines: lines_sha256 of
# spark_appliance/model/yamlfile.py, which says what counts as a comment.
{ lib }:
file:
let
  withoutComment =
    line:
    let
      parts = builtins.match "([^#]*[^ \t\r#])[ \t\r]+#[^\"']*" line;
    in
    if parts == null then line else lib.head parts;
  withoutBlanks =
    line:
    let
      parts = builtins.match "(.*[^ \t\r])[ \t\r]*" line;
    in
    if parts == null then "" else lib.head parts;
  isContent = line: builtins.match "[ \t\r]*(#.*)?" line == null;
  lines = map (line: withoutBlanks (withoutComment line)) (
    lib.splitString "\n" (builtins.readFile file)
  );
in
builtins.hashString "sha256" (
  lib.concatMapStrings (line: line + "\n") (lib.filter isContent lines)
)
