// SPDX-License-Identifier: Apache-2.0
// The panel that says which number of spares and workers would be best.

import {getJson} from './api.js';
import {element, empty, count, digits, short} from './format.js';

const WAIT_MS = 1000;

export class Advice {
  constructor() {
    this.list = element('div', {id: 'advice', 'aria-live': 'polite'});
    this.root = element('section', {'aria-label': 'Advice', class: 'advice'}, [
      element('h2', {text: 'Would other spares, or one worker less, help?'}), this.list,
    ]);
  }

  clear() {
    this.shown = null;
    this.show({state: 'computing'});
  }

  async load(job) {
    if (this.shown === job.id + job.updates) return;
    this.shown = job.id + job.updates;
    const mine = this.shown;
    for (;;) {
      let answer;
      try {
        answer = await getJson('advice', {job: job.id});
      } catch (error) {
        answer = {state: 'none', reason: error.message};
      }
      if (mine !== this.shown) return;
      this.show(answer);
      if (answer.state !== 'computing') return;
      await new Promise(done => { setTimeout(done, WAIT_MS); });
    }
  }

  show(answer) {
    this.list.dataset.state = answer.state;
    if (answer.state === 'computing') {
      empty(this.list).append(element('p', {text: 'Simulating…'}));
    } else if (answer.state === 'none') {
      empty(this.list).append(element('p', {text: `No estimate: ${short(answer.reason, 300)}.`}));
    } else {
      const best = element('p', {class: 'words', text: capital(short(answer.best, 200))});
      const scaled = scale(answer.cases);
      empty(this.list).append(best, ...answer.cases.map(each => row(each, scaled)), axis(scaled), ...notes(answer));
    }
  }
}

const VERDICTS = {helps: '▲ helps', costs: '▼ costs', same: '● about the same'};
// Changes of the axis: from half to double, or so many powers of two wide that all intervals fit.
const NEAR = {powers: 1, factors: [0.5, 0.75, 1, 1.5, 2]};
const MOST_STEP = 4;

function scale(cases) {
  const wanted = Math.max(...cases.flatMap(({gradients}) => [gradients.low, gradients.high].map(value => Math.abs(Math.log2(value)))));
  if (!(wanted > 1)) return NEAR;
  const step = Math.min(MOST_STEP, Math.ceil(wanted / 3)), steps = Math.min(3, Math.ceil(wanted / step)), factors = [];
  for (let each = -steps; each <= steps; each += 1) factors.push(2 ** (each * step));
  return {powers: steps * step, factors};
}

function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

function row(found, scaled) {
  const {updates, gradients} = found;
  return element('div', {class: `case ${found.verdict}`, 'data-name': found.name}, [
    element('h3', {}, [element('span', {text: short(found.name, 60)}), element('span', {class: 'verdict', text: VERDICTS[found.verdict]})]),
    bar(gradients, scaled),
    element('p', {text: `gradients per second ${change(gradients)}; updates per second ${change(updates)}, ` +
      `each of ${count(found.gradients_per_update, 'gradient')}`}),
  ]);
}

function place(value, {powers}) {
  return 50 + 50 * Math.max(-1, Math.min(1, Math.log2(value) / powers));
}

function bar(interval, scaled) {
  const track = element('div', {class: 'interval', role: 'img', 'aria-label': change(interval)});
  const range = element('span', {class: 'range-bar'}), middle = element('span', {class: 'middle'});
  const left = Math.min(99.4, place(interval.low, scaled));
  range.style.left = `${left}%`;
  range.style.width = `${Math.max(0.6, place(interval.high, scaled) - left)}%`;
  middle.style.left = `${place(interval.middle, scaled)}%`;
  track.append(...scaled.factors.map(factor => {
    const line = element('span', {class: factor === 1 ? 'tick zero' : 'tick'});
    line.style.left = `${place(factor, scaled)}%`;
    return line;
  }), range, middle);
  return track;
}

function axis(scaled) {
  const made = element('div', {class: 'advice-axis', 'aria-hidden': 'true'});
  made.append(...scaled.factors.map(factor => {
    const text = element('span', {text: factor === 1 ? 'as now' : signed(factor)});
    text.style.left = `${place(factor, scaled)}%`;
    return text;
  }));
  return made;
}

function signed(factor) {
  const rounded = Math.round(100 * (factor - 1));
  return `${rounded > 0 ? '+' : rounded < 0 ? '−' : '±'}${Math.abs(rounded)} %`;
}

function change(interval) {
  return `${signed(interval.middle)} (${signed(interval.low)} to ${signed(interval.high)})`;
}

function notes(answer) {
  const {simulated} = answer;
  return [element('p', {class: 'hint', text: 'Gradients per second, intervals of 90 %, by bootstrap of the measured times of ' +
    `${count(answer.updates, 'update')}, replayed with ${count(answer.workers, 'worker')} and ${count(answer.spares, 'spare')}. ` +
    `The replay makes ${digits(simulated.low)} to ${digits(simulated.high)} updates per second as it is now; measured: ` +
    `${digits(answer.measured)}. What crosses the network isn't simulated.`})];
}
