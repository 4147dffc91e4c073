// SPDX-License-Identifier: Apache-2.0
// Colours. Categories are of the Okabe-Ito palette, amounts of viridis; each has a second cue: a pattern, a height or a number.

const LIGHT = {
  accepted: '#0072B2', dropped: '#D55E00', wait: '#56B4E9', held: '#CC79A7', lost: '#000000', input: '#009E73', reduce: '#E69F00',
  paper: '#ffffff', lane: '#f4f5f7', line: '#c9ced6', text: '#24292f', faint: '#57606a', pattern: '#ffffff',
};
const DARK = {
  accepted: '#3D9BDC', dropped: '#F07F2E', wait: '#A6D3EE', held: '#DB93BB', lost: '#ffffff', input: '#2FBF95', reduce: '#F2B733',
  paper: '#303030', lane: '#3a3a3a', line: '#5c5c5c', text: '#f0f0f0', faint: '#c0c0c0', pattern: '#202020',
};
const VIRIDIS = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141],
  [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37],
];

let isDark = false;

export function colours() {
  return isDark ? DARK : LIGHT;
}

export function viridis(part) {
  const place = Math.max(0, Math.min(1, part)) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return VIRIDIS[low].map((from, i) => Math.round(from + (VIRIDIS[low + 1][i] - from) * (place - low)));
}

// Follows TensorBoard's own setting (a class of the body around this frame), else that of the system.
export function followTheme(changed) {
  const system = matchMedia('(prefers-color-scheme: dark)');
  let around = null;
  try { around = parent !== window ? parent.document.body : null; } catch { /* another origin */ }
  const apply = () => {
    isDark = around ? around.classList.contains('dark-mode') : system.matches;
    document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
    changed();
  };
  if (around) new MutationObserver(apply).observe(around, {attributeFilter: ['class']});
  system.addEventListener('change', apply);
  apply();
}

// Hatches and dots in the colour of a category.
export function pattern(context, name, scale) {
  const palette = colours();
  const size = 6 * scale;
  const tile = new OffscreenCanvas(size, size);
  const pen = tile.getContext('2d');
  pen.fillStyle = palette[name];
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = pen.fillStyle = palette.pattern;
  pen.lineWidth = 1.2 * scale;
  if (name === 'dropped') {
    pen.beginPath();
    for (const shift of [-size, 0, size]) { pen.moveTo(shift, size); pen.lineTo(shift + size, 0); }
    pen.stroke();
  } else if (name === 'input') {
    pen.fillRect(0, size / 4, size, size / 8);
    pen.fillRect(0, 3 * size / 4, size, size / 8);
  } else if (name === 'held') {
    pen.fillRect(size / 6, size / 6, size / 3, size / 3);
    pen.fillRect(2 * size / 3, 2 * size / 3, size / 3, size / 3);
  }
  return context.createPattern(tile, 'repeat');
}
