// The TypeScript SDK: list the tools, call one, ask for one that is refused; prints one JSON line.
// argv: the folder the SDK is installed in, then the server's command.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, command, ...args] = process.argv.slice(2);
const from = createRequire(`${folder}/package.json`);
const load = (name) => import(pathToFileURL(from.resolve(`@modelcontextprotocol/sdk/${name}`)));
const { Client } = await load("client/index.js");
const { StdioClientTransport } = await load("client/stdio.js");

const client = new Client({ name: "list-and-call", version: "1" });
await client.connect(new StdioClientTransport({ command, args, env: process.env }));
const { tools } = await client.listTools();
const status = await client.callTool({ name: "get_status", arguments: {} });
const refused = await client.callTool({ name: "wait_run", arguments: { run_id: "nobody" } });
console.log(
  JSON.stringify({
    tools: tools.map((tool) => tool.name),
    status: status.content[0].text,
    structured: status.structuredContent,
    refused: refused.isError ? refused.content[0].text : "",
  }),
);
await client.close();
