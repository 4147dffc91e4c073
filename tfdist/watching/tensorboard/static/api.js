// SPDX-License-Identifier: Apache-2.0
// Requests to the plugin's data routes, relative to the page.

export async function getJson(route, parameters) {
  return (await answer(route, parameters)).json();
}

// Returns the header of a binary block, with its arrays beside the other fields.
export async function getBlock(route, parameters) {
  const buffer = await (await answer(route, parameters)).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let place = 4 + length;
  for (const {name, kind, shape} of header.arrays) {
    const size = shape.reduce((product, each) => product * each, 1);
    header[name] = kind === 'f' ? new Float32Array(buffer, place, size) : new Int32Array(buffer, place, size);
    place += 4 * size;
  }
  return header;
}

async function answer(route, parameters) {
  const response = await fetch(`./${route}?${new URLSearchParams(parameters)}`);
  if (!response.ok) {
    const text = await response.text();
    let reason = text.slice(0, 200);
    try { reason = JSON.parse(text).error; } catch { /* not of this plugin */ }
    throw new Error(reason || `${response.status} ${response.statusText}`);
  }
  return response;
}

// Runs one request at a time; of those that are made meanwhile the newest follows, and the others return null.
export function latest(run) {
  let newest = 0, last = Promise.resolve();
  return argument => {
    const mine = ++newest;
    last = last.catch(() => null).then(() => (mine === newest ? run(argument) : null));
    return last;
  };
}
