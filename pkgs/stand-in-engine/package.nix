# For tests: `bin/python3 -m sglang.launch_server ...` that answers without GPU and model, and a
# checkpoint of a few bytes with an index that names its shards.
{
  lib,
  runCommand,
  writeShellApplication,
  symlinkJoin,
  python3,
  spark-engram,
}:
let
  python = writeShellApplication {
    name = "python3";
    text = ''
      exec ${lib.getExe python3} ${./stand_in_engine.py} "$@"
    '';
  };
  checkpoint =
    runCommand "stand-in-checkpoint"
      {
        nativeBuildInputs = [ python3 ];
        shards = 2;
      }
      ''
        mkdir $out
        python3 ${./checkpoint.py} $out $shards
      '';
in
symlinkJoin {
  name = "stand-in-engine";
  paths = [
    python
    spark-engram
  ];
  passthru = { inherit checkpoint; };
  meta = {
    description = "Stand-in for the engine in tests";
    license = lib.licenses.asl20;
    mainProgram = "python3";
  };
}
