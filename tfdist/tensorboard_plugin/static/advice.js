// SPDX-License-Identifier: Apache-2.0
// The panel that says whether one more spare, or one worker less, would help.

import {getJson} from './api.js';
import {element, empty, count, digits, short} from './format.js';

const WAIT_MS = 1000;

export class Advice {
  constructor() {
    this.list = element('div', {id: 'advice', 'aria-live': 'polite'});
    this.root = element('section', {'aria-label': 'Advice', class: 'advice'}, [
      element('h2', {text: 'Would one more spare, or one worker less, help?'}), this.list,
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
      empty(this.list).append(...answer.cases.map(each => row(each)), ...notes(answer));
    }
  }
}

function row(found) {
  const {updates, gradients} = found;
  const clear = gradients.low > 1.02 ? 'yes' : gradients.high < 0.98 ? 'no' : 'unclear';
  const verdict = {yes: '▲ helps', no: '▼ costs', unclear: '● about the same'}[clear];
  return element('div', {class: `case ${clear}`, 'data-name': found.name}, [
    element('h3', {}, [element('span', {text: short(found.name, 60)}), element('span', {class: 'verdict', text: verdict})]),
    bar(gradients),
    element('p', {text: `gradients per second ${change(gradients)}; updates per second ${change(updates)}, ` +
      `each of ${count(found.gradients_per_update, 'gradient')}`}),
  ]);
}

// Interval and middle on an axis from half to double.
function bar(interval) {
  const place = value => 50 + 50 * Math.max(-1, Math.min(1, Math.log2(value)));
  const track = element('div', {class: 'interval', role: 'img', 'aria-label': change(interval)});
  const range = element('span', {class: 'range-bar'}), middle = element('span', {class: 'middle'});
  range.style.left = `${place(interval.low)}%`;
  range.style.width = `${Math.max(0.6, place(interval.high) - place(interval.low))}%`;
  middle.style.left = `${place(interval.middle)}%`;
  track.append(element('span', {class: 'zero'}), range, middle);
  return track;
}

function change(interval) {
  const signed = value => {
    const rounded = Math.round(100 * (value - 1));
    return `${rounded > 0 ? '+' : rounded < 0 ? '−' : '±'}${Math.abs(rounded)} %`;
  };
  return `${signed(interval.middle)} (${signed(interval.low)} to ${signed(interval.high)})`;
}

function notes(answer) {
  const {simulated} = answer;
  return [element('p', {class: 'hint', text: 'Half to double; intervals of 90 %, by bootstrap of the measured times of ' +
    `${count(answer.updates, 'update')}, replayed with ${count(answer.workers, 'worker')} and ${count(answer.spares, 'spare')}. ` +
    `The replay makes ${digits(simulated.low)} to ${digits(simulated.high)} updates per second as it is now; measured: ` +
    `${digits(answer.measured)}. What crosses the network isn't simulated.`})];
}
