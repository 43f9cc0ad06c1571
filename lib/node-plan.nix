/**
  A node's own plan: what of the whole plan concerns that node. The same projection as
  `node_plan` of spark_appliance/node/projection.py, by the same data; a test holds them equal.

  # Inputs

  `plan`: a whole plan, or that node's own, which comes out as it went in.
  `name`: a node of it.
*/
{ lib }:
let
  rules = lib.importJSON ../spark_appliance/node/projection.json;
  peer = lib.filterAttrs (key: _: lib.elem key rules.peer);
in
plan: name:
let
  missing = throw "the plan has no node ${name}";
  own = lib.findFirst (node: node.name == name) missing plan.nodes;
  here = end: end != null && end.node == name;
  ownCables = lib.filter (cable: here cable.a || here cable.b);

  # the value in a list, or an empty one for what is not this node's
  part = {
    all = value: [ value ];
    head = value: lib.optional (own.role == "head") value;
    cables = value: [ (value // { cables = ownCables value.cables; }) ];
    none = _: [ ];
  };
  parts = lib.mapAttrs (key: part.${rules.plan.${key} or "none"}) (removeAttrs plan [ "nodes" ]);
  kept = lib.filterAttrs (_: value: value != [ ]) parts;
in
lib.mapAttrs (_: lib.head) kept
// {
  nodes = map (node: if node.name == name then node else peer node) plan.nodes;
}
