// SPDX-License-Identifier: Apache-2.0
// Elements and texts. Whatever comes from a log is shown through textContent, never as HTML.

export function element(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'text') made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function empty(node) {
  node.replaceChildren();
  return node;
}

const NUMBER = new Intl.NumberFormat('en-US', {maximumFractionDigits: 0});

export function whole(value) {
  return NUMBER.format(value);
}

export function count(value, noun) {
  return `${whole(value)} ${noun}${value === 1 ? '' : 's'}`;
}

export function secs(value) {
  const size = Math.abs(value);
  if (size < 5e-7) return '0 s';
  if (size < 0.0000995) return `${digits(1e6 * value)} µs`;
  if (size < 0.0995) return `${digits(1000 * value)} ms`;
  if (size < 600) return `${digits(value)} s`;
  if (size < 36000) return `${digits(value / 60)} min`;
  return `${digits(value / 3600)} h`;
}

// Unit, its size, and from which value on it is used.
const SECS = [['ms', 1e-3, 0], ['s', 1, 0.995], ['min', 60, 600], ['h', 3600, 36000]];
export const BYTES = [['B', 1, 0], ['kB', 1e3, 1e3], ['MB', 1e6, 1e6], ['GB', 1e9, 1e9], ['TB', 1e12, 1e12]];
const unitOf = (units, value) => units.findLast(each => value >= each[2]);

// Returns the unit, and a function that writes values in it: the same for all of `values`, by the largest, and as
// precise as this or, for ticks of an axis, as the step between them.
export function commonUnit(values, units = SECS, step = 0) {
  const most = Math.max(...values.map(Math.abs), 0) || 1, [unit, size] = unitOf(units, most);
  const precision = step / size || (most / size >= 99.5 ? 1 : most / size >= 9.95 ? 0.1 : 0.01);
  const places = Math.min(12, Math.max(0, -Math.floor(Math.log10(precision) + 1e-9)));
  const format = new Intl.NumberFormat('en-US', {minimumFractionDigits: places, maximumFractionDigits: places});
  return {unit, text: value => (value ? format.format(value / size) : '0')};
}

export function digits(value) {
  if (!value) return '0';
  const size = Math.abs(value);
  return size >= 1000 ? NUMBER.format(value) : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

export function percent(value) {
  return `${(100 * value).toFixed(Math.abs(value) < 0.0995 && value ? 1 : 0)} %`;
}

export function wallTime(unix) {
  const date = new Date(1000 * unix);
  return Number.isNaN(date.getTime()) ? '' : date.toLocaleString('sv-SE').slice(0, 16);
}

export function short(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

// Ticks of an axis: round numbers.
export function ticks(begin, end, most) {
  const raw = (end - begin) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= raw * 0.999);
  return {step, values: multiples(step, begin, end)};
}

// Ticks of an axis of time: round numbers of seconds, minutes or hours.
export function timeTicks(begin, end, most) {
  const raw = (end - begin) / Math.max(1, most);
  if (raw <= 20) return ticks(begin, end, most);
  const steps = [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const step = steps.find(each => each >= raw) || 86400 * Math.ceil(raw / 86400);
  return {step, values: multiples(step, begin, end)};
}

function multiples(step, begin, end) {
  const found = [];
  for (let i = Math.ceil(begin / step - 1e-9); i * step <= end + step * 1e-9; i++) found.push(i * step);
  return found;
}

// Text of a tick on an axis of seconds.
export function tickSecs(value, step) {
  if (step < 30) return `${value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))} s`;
  const total = Math.round(value), two = each => String(each).padStart(2, '0');
  const hours = Math.floor(total / 3600), minutes = Math.floor(total / 60) % 60;
  return `${hours}:${two(minutes)}:${two(total % 60)}`;
}
